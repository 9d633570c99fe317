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
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fxsplit.errors import InputError
from fxsplit.formats.stored_names import Recipe, list_recipes
from fxsplit.ir.facts.figures import show
from fxsplit.ir.files import explain_unreadable
from fxsplit.ir.progress import track
from fxsplit.ir.progress_bar import show_progress
from fxsplit.torch_internals.fake_weights import dress_like, fill_like
from fxsplit.torch_internals.grad_leaves import list_gradient_hooks

INDEX = ".index.json"


class WeightFiles:
    """The files of a checkpoint: which of them holds each tensor.

    `path` is a .safetensors file, an index (.safetensors.index.json) beside its files, or a folder with either.
    dtype: that of the weights to be loaded, for tensors of other floating-point dtypes to be converted to it.

    Raises InputError for a path that is not there, or is none of these, and for what is no dtype of weights.
    """

    def __init__(self, path: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise InputError(f"weights={path!r}: give the path of a checkpoint; a state_dict is loaded by the model")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and _is_convertible(dtype)):
            raise InputError(
                f"dtype={show(dtype)}: give the floating-point dtype of the model's weights, such as torch.float32"
            )
        self._dtype = dtype
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
        weight has several, or as transformers finds them.
        Raises InputError, before anything is loaded, naming a weight that no file holds, or holds in another shape or
        dtype; and, if `strict`, a tensor that the model does not have.
        """
        state = {k: w for k, w in model.state_dict(keep_vars=True).items() if isinstance(w, Tensor)}
        # By identity: a tied weight is one object with several names, of which files may hold one or all.
        names: dict[int, list[str]] = {}
        for name, weight in state.items():
            names.setdefault(id(weight), []).append(name)
        with self._opened() as handles, torch.no_grad():
            # All checks come before the first weight changes: a model is loaded whole or not at all.
            recipe_of = self._find_recipes(handles, model, state)
            _check_names(model, state, recipe_of, names, strict, self.path)
            stored = {key: [name for name in known if name in recipe_of] for key, known in names.items()}
            # Each weight once, in the order of the stages, so that devices fill up one after another.
            weights = {id(w): w for w in (*(w for w, _ in places if id(w) in stored), *state.values())}
            for key, weight in weights.items():
                self._check_tied(handles, stored[key], recipe_of)
                _check_free(stored[key][0], weight)
            where = {id(weight): device for weight, device in places}
            waiting = {stored[key][0]: weight for key, weight in weights.items()}
            with show_progress():
                for first in track(list(waiting), "loading weights"):
                    # One recipe may have made several weights at once.
                    found = recipe_of[first].make(partial(self._read, handles)) if first in waiting else {}
                    for name in found.keys() & waiting.keys():
                        weight = waiting.pop(name)
                        device = where.get(id(weight), torch.device("cpu") if weight.is_meta else weight.device)
                        _give(weight, found.pop(name), device, is_new=not recipe_of[first].whole)

    def _find_recipes(self, handles: Any, model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Recipe]:
        """Return how each weight that the files hold is made of their tensors, by its name.

        Among them are tensors that the model does not have. Raises InputError for a weight of another shape or dtype.
        """
        recipe_of: dict[str, Recipe] = {}
        kinds: dict[str, Tensor] = {}
        for recipe in list_recipes(model, self._file_of, state.keys()):
            made = self._try(handles, recipe) if recipe.target in state else {}
            recipe_of |= dict.fromkeys((recipe.target, *made), recipe)
            kinds |= made
        for name in state:
            if name in kinds:
                self._check_kind(recipe_of[name], name, kinds[name], state[name])
        return recipe_of

    def _read(self, handles: Any, name: str) -> Tensor:
        """Return a tensor of the files. Its memory is that of the mapped file, and changes with the file."""
        tensor: Tensor = handles(self._file_of[name]).get_tensor(name)
        return tensor

    def _try(self, handles: Any, recipe: Recipe) -> dict[str, Tensor]:
        """Return what a recipe makes, on the meta device: nothing is read. Raises InputError where it makes nothing."""
        made = {name: self._read_kind(handles, name) for name in recipe.sources}
        try:
            return recipe.make(made.__getitem__)
        except Exception as error:
            raise InputError(
                f"{self.path.name}: {recipe.target!r} cannot be made of its {len(made)} tensors, such as "
                f"{recipe.sources[0]!r} ({error}): is it complete, and of this model?"
            ) from error

    def _read_kind(self, handles: Any, name: str) -> Tensor:
        """Return a tensor on the meta device with the shape and the dtype that a file says; raises InputError."""
        handle = handles(self._file_of[name])
        try:
            held = handle.get_slice(name)
        except SafetensorError as error:
            file = self._file_of[name].name
            raise InputError(f"{self.path.name}: {file} does not hold {name!r} ({error}): is it complete?") from error
        shape = tuple(held.get_shape())
        # A slice has no dtype, but an empty part of it does, and loads nothing. Scalars cannot be sliced.
        return torch.empty(shape, dtype=(held[:0] if shape else handle.get_tensor(name)).dtype, device="meta")

    def _check_tied(self, handles: Any, names: Sequence[str], recipe_of: Mapping[str, Recipe]) -> None:
        """Raise InputError where the files hold different values for one weight that has several names."""
        read = partial(self._read, handles)
        for name in names[1:]:
            first, other = (recipe_of[one].make(read)[one] for one in (names[0], name))
            if not torch.equal(first, other):
                raise InputError(
                    f"{names[0]!r} and {name!r} are one weight in the model, and have different values in "
                    f"{self.path.name}: untie them, or save the checkpoint again from a model that has them tied"
                )

    def _check_kind(self, recipe: Recipe, name: str, found: Tensor, weight: Tensor) -> None:
        """Raise InputError unless what the files hold is of the weight's shape, and of its dtype or convertible to it.

        `found` is what is made of the files' tensors, without values.
        """
        file = self._file_of[recipe.sources[0]].name
        what = f"{name!r} is {found.dtype} {tuple(found.shape)} in {file} and {weight.dtype} {tuple(weight.shape)}"
        if found.shape != weight.shape:
            raise InputError(f"{what} in the model: build the model as the checkpoint's was")
        if found.dtype == weight.dtype:
            return
        if not (_is_convertible(found.dtype) and _is_convertible(weight.dtype)):
            raise InputError(f"{what} in the model, which no dtype= converts: build the model as the checkpoint's was")
        if self._dtype != weight.dtype:
            raise InputError(
                f"{what} in the model: dtype={weight.dtype} converts tensors as they are read, and "
                f"model.to({found.dtype}) makes the model as the checkpoint is"
            )


def _is_convertible(dtype: torch.dtype) -> bool:
    """Return whether weights of a dtype may be converted to another while they are read."""
    # Numbers of one byte are parts of a quantised weight, whose scales are other tensors.
    return dtype.is_floating_point and dtype.itemsize > 1


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
    held: Mapping[str, Recipe],
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


def _give(weight: Tensor, value: Tensor, device: torch.device, *, is_new: bool) -> None:
    """Give a weight a value. The weight stays the same object, which optimizers may hold, with its attributes.

    is_new: whether the value's memory is nobody else's, so that it can become the weight's. What is read from a file is
    always copied, since its memory is that of the mapped file; copying converts it to the weight's dtype.
    """
    if not weight.is_meta:
        weight.copy_(value)
        return
    if is_new and (value.dtype, value.device, value.stride()) == (weight.dtype, device, weight.stride()):
        torch.utils.swap_tensors(weight, dress_like(weight, value))
    else:
        torch.utils.swap_tensors(weight, fill_like(weight, value, device, weight.dtype))
