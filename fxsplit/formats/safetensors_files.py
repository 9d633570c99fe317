"""Checkpoints in safetensors files: one file, or several with an index. Tensors are read one at a time.

The index of a checkpoint in several files is JSON beside them: {"weight_map": {"layer.weight": "model-1.safetensors"}}.
Each tensor goes straight to its device, so that no more than one of them is in host memory at a time.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fxsplit.errors import InputError
from fxsplit.ir.facts.figures import show
from fxsplit.ir.files import explain_unreadable
from fxsplit.torch_internals.fake_weights import fill_like
from fxsplit.torch_internals.grad_leaves import list_gradient_hooks

INDEX = ".index.json"


class WeightFiles:
    """The files of a checkpoint: which of them holds each tensor.

    `path` is a .safetensors file, an index (.safetensors.index.json) beside its files, or a folder with either.
    Raises InputError for a path that is not there, or is none of these.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise InputError(f"weights={path!r}: give the path of a checkpoint; a state_dict is loaded by the model")
        self.path = _find_file(Path(path))
        if self.path.name.endswith(INDEX):
            self._file_of = _read_index(self.path)
        else:
            with self._opened() as handles:
                self._file_of = dict.fromkeys(handles(self.path).keys(), self.path)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Yield a function that returns a file's open handle; each file is opened once, and closed after the block."""
        with ExitStack() as stack:

            @cache
            def opened(file: Path) -> Any:
                try:
                    return stack.enter_context(safe_open(str(file), framework="pt"))
                except (OSError, SafetensorError) as error:
                    raise InputError(f"{str(file)!r} cannot be read as safetensors: {error}") from error

            yield opened

    @torch.inference_mode(False)
    def load(self, model: nn.Module, places: Sequence[tuple[Tensor, torch.device]], strict: bool) -> None:
        """Give each weight of the model its value from the files, on its device, in the order of `places`.

        `places` are pairs of a weight and its device. Other weights stay where they are, or go to host memory where
        they have no values yet. Weights are found by the names of the model's state_dict, of which a tied
        weight has several. Raises InputError, before anything is loaded, naming a weight that no file holds, or holds
        in another shape or dtype; and, if `strict`, a tensor that the model does not have.
        """
        state = {k: w for k, w in model.state_dict(keep_vars=True).items() if isinstance(w, Tensor)}
        # By identity: a tied weight is one object with several names, of which files may hold one or all.
        names: dict[int, list[str]] = {}
        for name, weight in state.items():
            names.setdefault(id(weight), []).append(name)
        _check_names(model, state, self._file_of, names, strict, self.path)
        stored = {key: next(n for n in known if n in self._file_of) for key, known in names.items()}
        # Each weight once, in the order of the stages, so that devices fill up one after another.
        where = {id(weight): device for weight, device in places}
        weights = {id(w): w for w in (*(w for w, _ in places if id(w) in stored), *state.values())}.values()
        with self._opened() as handles, torch.no_grad():
            # All checks come before the first weight changes: a model is loaded whole or not at all.
            for weight in weights:
                held = [name for name in names[id(weight)] if name in self._file_of]
                for name in held:
                    self._check_kind(handles, name, weight)
                self._check_tied(handles, held)
                _check_free(stored[id(weight)], weight)
            for weight in weights:
                device = where.get(id(weight), torch.device("cpu") if weight.is_meta else weight.device)
                value = handles(self._file_of[stored[id(weight)]]).get_tensor(stored[id(weight)])
                # Always a copy: what is read is the memory of the mapped file, and would change with the file.
                _give(weight, value.to(device))

    def _check_tied(self, handles: Any, names: Sequence[str]) -> None:
        """Raise InputError where the files hold different values for one weight that has several names."""
        for name in names[1:]:
            first, other = (handles(self._file_of[one]).get_tensor(one) for one in (names[0], name))
            if not torch.equal(first, other):
                raise InputError(
                    f"{names[0]!r} and {name!r} are one weight in the model, and have different values in "
                    f"{self.path.name}: untie them, or save the checkpoint again from a model that has them tied"
                )

    def _check_kind(self, handles: Any, name: str, weight: Tensor) -> None:
        """Raise InputError unless the file holds a weight in the shape and dtype of the model's."""
        handle = handles(self._file_of[name])
        try:
            held = handle.get_slice(name)
        except SafetensorError as error:
            file = self._file_of[name].name
            raise InputError(f"{self.path.name}: {file} does not hold {name!r} ({error}): is it complete?") from error
        shape = tuple(held.get_shape())
        # A slice has no dtype, but an empty part of it does, and loads nothing. Scalars cannot be sliced.
        dtype = (held[:0] if shape else handle.get_tensor(name)).dtype
        if (shape, dtype) != (tuple(weight.shape), weight.dtype):
            raise InputError(
                f"{name!r} is {dtype} {shape} in {self._file_of[name].name} and {weight.dtype} {tuple(weight.shape)} "
                "in the model: build the model as the checkpoint's was, for example with model.to(torch.bfloat16)"
            )


def _find_file(path: Path) -> Path:
    """Return the .safetensors file or the index that a path means; raises InputError where that is not clear."""
    if path.is_dir():
        # An index comes first: beside it lie the files that it names, several of the other kind.
        kinds = ("*.safetensors" + INDEX, "*.safetensors")
        found = next((files for kind in kinds if (files := sorted(path.glob(kind)))), [])
        if len(found) != 1:
            names = ", ".join(f.name for f in found) or "none"
            raise InputError(f"folder {str(path)!r} holds {names}: give one .safetensors file, or an index of several")
        return found[0]
    if not path.is_file():
        raise InputError(f"there is no checkpoint {str(path)!r}: give a .safetensors file, its index, or their folder")
    return path


def _read_index(path: Path) -> dict[str, Path]:
    """Return the file of each tensor that an index names; raises InputError for files that are not beside it."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = dict(held.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = explain_unreadable(error)
        raise InputError(f"{str(path)!r} is no index of safetensors files (no weight_map): {what}") from error
    # A name with a folder in it could lead anywhere, and an index comes from others.
    for file in files.values():
        if not isinstance(file, str) or PurePosixPath(file).name != file or not os.path.isfile(path.parent / file):
            raise InputError(
                f"{path.name} names {show(file)}, which is no file in {str(path.parent)!r}: it must lie beside"
            )
    return {name: path.parent / file for name, file in files.items()}


def _check_names(
    model: nn.Module,
    state: Mapping[str, Tensor],
    held: Mapping[str, Path],
    names: Mapping[int, Sequence[str]],
    strict: bool,
    path: Path,
) -> None:
    """Raise InputError unless the files hold a tensor for each weight of the model, and, if `strict`, no others."""
    # state_dict() hooks may make tensors that no file can be loaded into.
    held_by_model = {id(w) for w in (*model.parameters(), *model.buffers())}
    made = next((name for name, w in state.items() if id(w) not in held_by_model), None)
    if made is not None:
        raise InputError(
            f"state_dict() of {type(model).__name__} makes {made!r}, which is none of its parameters or buffers: load "
            "such a checkpoint with load_state_dict()"
        )
    missing = [known[0] for known in names.values() if not any(name in held for name in known)]
    if missing:
        raise InputError(
            f"{str(path)!r} lacks {len(missing)} of the {len(names)} weights of {type(model).__name__}, such as "
            f"{missing[0]!r} (it has {next(iter(held), 'none')!r}): give the checkpoint of this model, by its own names"
        )
    extra = sorted(held.keys() - state.keys())
    if strict and extra:
        raise InputError(
            f"{str(path)!r} holds {len(extra)} tensors that {type(model).__name__} does not have, such as "
            f"{extra[0]!r}: give its own checkpoint, or pipe.load_weights(path, strict=False) to leave them out"
        )
    # What is not persistent is in no checkpoint, and must have its values already.
    named = [*model.named_parameters(), *model.named_buffers()]
    lost = next((name for name, w in named if w.is_meta and id(w) not in names), None)
    if lost is not None:
        raise InputError(
            f"{lost!r} is on the meta device, and no checkpoint can hold it, as it is not persistent: build the model "
            "inside fxsplit.without_weights(), which makes parameters on the meta device and computes buffers"
        )


def _check_free(name: str, weight: Tensor) -> None:
    """Raise InputError for a weight without values that cannot get any and stay the same object.

    `torch.utils.swap_tensors` gives it values, and refuses a tensor that something else refers to.
    """
    if not weight.is_meta:
        return
    if any(list_gradient_hooks(weight)):
        raise InputError(f"{name!r} has gradient hooks and no values yet: register hooks after its weights are loaded")
    if weakref.getweakrefcount(weight) or weight._use_count() > 1:  # type: ignore[attr-defined]
        raise InputError(
            f"{name!r} has no values yet, and a weak reference or an autograd graph holds on to it: drop that first"
        )


def _give(weight: Tensor, value: Tensor) -> None:
    """Give a weight a value. The weight stays the same object, which optimizers may hold, with its attributes."""
    if weight.is_meta:
        torch.utils.swap_tensors(weight, fill_like(weight, value))
    else:
        weight.copy_(value)
