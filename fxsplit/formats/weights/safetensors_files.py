"""Load checkpoints from safetensors: one file, or several with an index, one tensor at a time.

The index is a JSON file in the same folder: {"weight_map": {"layer.weight": "model-1.safetensors"}}. Each tensor is
read once and moved straight to its device, so that host memory holds at most one tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit.errors import InputError
from fxsplit.formats.weights.checkpoint_names import Extra, check_free, check_names, name_weights
from fxsplit.formats.weights.safetensors_reader import TensorFile
from fxsplit.formats.weights.stored_names import Recipe, list_recipes
from fxsplit.system.figures import show
from fxsplit.system.files import explain_unreadable
from fxsplit.system.progress import track
from fxsplit.system.progress_bar import show_progress
from fxsplit.torch_internals.distributed.remote_tensors import exchange, is_remote
from fxsplit.torch_internals.tensors.copy_trace import CopiedPart, Parts, fits, trace_copies
from fxsplit.torch_internals.tensors.dress import dress_like, fill_like

INDEX = ".index.json"


class WeightFiles:
    """The files of a checkpoint, and the file in which each tensor lies.

    - `path`: a .safetensors file, an index (.safetensors.index.json), or a folder with one of them
    - `dtype`: convert tensors of other floating-point dtypes to this dtype of the model's weights
    Raises InputError for a path that is missing or something else, and for an invalid dtype.
    """

    def __init__(self, path: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise InputError(
                f"weights={path!r}: give the path of a checkpoint, or use load_state_dict() for a state_dict"
            )
        if dtype is not None and not (isinstance(dtype, torch.dtype) and _is_convertible(dtype)):
            raise InputError(
                f"dtype={show(dtype)}: give the floating-point dtype of the model's weights, such as torch.float32"
            )
        self._dtype = dtype
        self.path = _find_file(Path(path))
        if self.path.name.endswith(INDEX):
            self._file_of = _read_index(self.path)
        else:
            with TensorFile(self.path) as file:
                self._file_of = dict.fromkeys(file.list_names(), self.path)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Yield a function that returns an open file. Each file is opened only once, and closed after the block."""
        with ExitStack() as stack:
            yield cache(lambda file: stack.enter_context(TensorFile(file)))

    @torch.inference_mode(False)
    def load(self, model: nn.Module, places: Sequence[tuple[Tensor, torch.device]], extra: Extra) -> None:
        """Load each weight of the model from the files to its device, in the order of `places`.

        - `places`: pairs of a weight and its device. Other weights stay on their devices, or go to host memory if they
          have no values yet.
        - `extra`: what to do about a tensor that the model neither has nor ignores
        Weights are found by the names of the model's state_dict (a tied weight has several), or by transformers' rules.
        Tied weights that the files hold several times are loaded first. Raises InputError before any weight changes:
        for a weight that is missing or differs in shape or dtype, for an extra tensor that `extra` refuses, and for a
        `dtype` that no weight of the model has.
        """
        state = {k: w for k, w in model.state_dict(keep_vars=True).items() if isinstance(w, Tensor)}
        self._check_dtype(model, state)
        names = name_weights(state)
        with self._opened() as files, torch.no_grad():
            # Check everything before the first weight changes: a model is loaded whole or not at all.
            recipe_of, parts_of = self._find_recipes(files, model, state)
            check_names(model, state, recipe_of, extra, self.path)
            stored = {k: found for k, known in names.items() if (found := [n for n in known if n in recipe_of])}
            # List each weight once, in the order of stages, so that devices fill up one after another.
            listed = [w for w in (*(w for w, _ in places), *state.values()) if id(w) in stored and not is_remote(w)]
            waiting = {stored[id(w)][0]: w for w in listed}
            for name, weight in waiting.items():
                check_free(name, weight)
            held = self._read_tied(files, [known for known in stored.values() if known[0] in waiting], recipe_of)
            where = {id(weight): device for weight, device in places}
            homes = {name: where.get(id(w), w.device) for name, w in waiting.items()}
            with show_progress():
                for first in track([*held, *(name for name in waiting if name not in held)], "loading weights"):
                    if first in held:
                        _give(waiting.pop(first), held.pop(first), homes[first])
                    # An earlier recipe may have made this weight too.
                    elif first in waiting:
                        self._follow(files, recipe_of[first], parts_of.get(first), waiting, homes)

    def _find_recipes(
        self, files: Any, model: nn.Module, state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Recipe], dict[str, dict[str, Parts]]]:
        """Return how to make each weight from tensors in the files, by the weight's name.

        A recipe names the tensors and the conversion. Tensors that the model lacks have recipes too. The second dict
        holds the parts of each weight that is joined from several tensors: each part can be read straight into its
        place. Raises InputError for a weight of another shape or dtype.
        """
        recipe_of: dict[str, Recipe] = {}
        kind_of: dict[str, Tensor] = {}
        in_parts: list[tuple[dict[str, Tensor], dict[str, Parts]]] = []
        for recipe in list_recipes(model, self._file_of, state.keys()):
            read = {name: self._read_kind(files, name) for name in recipe.sources} if recipe.target in state else {}
            made, parts = self._try(recipe, read) if read else ({}, None)
            recipe_of |= dict.fromkeys((recipe.target, *made), recipe)
            kind_of |= made
            if parts is not None:
                in_parts.append((read, {name: part for name, part in parts.items() if name in state}))
        for name, weight in state.items():
            if name in kind_of:
                self._check_kind(recipe_of[name], name, kind_of[name], weight)
        parts_of: dict[str, dict[str, Parts]] = {}
        for read, parts in in_parts:
            if all(fits(part, read, state[name]) for name, part in parts.items()):
                parts_of |= dict.fromkeys(parts, parts)
        return recipe_of, parts_of

    def _follow(
        self,
        files: Any,
        recipe: Recipe,
        parts: Mapping[str, Parts] | None,
        waiting: dict[str, Tensor],
        homes: Mapping[str, torch.device],
    ) -> None:
        """Run a recipe: load the weights in `waiting` that it makes, and remove them from `waiting`.

        `parts`: where each stored tensor goes in these weights, or None. `homes`: the device of each weight.
        """
        if parts is None or recipe.whole:
            found = recipe.make(partial(self._read, files))
            for name in found.keys() & waiting.keys():
                _give(waiting.pop(name), found.pop(name), homes[name])
            return
        ours = {name: waiting.pop(name) for name in parts.keys() & waiting.keys()}
        filled = {name: _make_room(weight, homes[name]) for name, weight in ours.items()}
        # Read one part at a time, so that memory holds one part and the weight.
        for source in recipe.sources:
            uses = [(filled[name], part) for name in ours for part in parts[name] if part.source == source]
            if uses:
                _fill(uses, self._read(files, source))
        for name, weight in ours.items():
            if weight.is_meta:
                exchange(weight, dress_like(weight, filled.pop(name)))

    def _read(self, files: Any, name: str) -> Tensor:
        """Return a tensor of the files in newly allocated memory."""
        tensor: Tensor = files(self._file_of[name]).read(name)
        return tensor

    def _try(self, recipe: Recipe, kinds: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Parts] | None]:
        """Run a recipe on meta tensors. Return its result, and the parts of each weight if weights are made of parts.

        Raises InputError if the recipe fails.
        """
        try:
            return trace_copies(recipe.make, kinds)
        except Exception as error:
            raise InputError(
                f"{self.path.name}: {recipe.target!r} cannot be made from its {len(kinds)} tensors, such as "
                f"{recipe.sources[0]!r} ({error}): is it complete, and a checkpoint of this model?"
            ) from error

    def _read_kind(self, files: Any, name: str) -> Tensor:
        """Return a meta tensor with the shape and dtype of a stored tensor. Raises InputError if the file lacks it."""
        file = self._file_of[name]
        try:
            kind: Tensor = files(file).read_kind(name)
        except KeyError:
            raise InputError(f"{self.path.name}: {file.name} does not hold {name!r}: is it complete?") from None
        return kind

    def _read_tied(
        self, files: Any, stored: Iterable[Sequence[str]], recipe_of: Mapping[str, Recipe]
    ) -> dict[str, Tensor]:
        """Return the values of weights that the files hold under several names, by first name. Each is read once.

        `stored`: the names of each weight in the files. Raises InputError if the files hold different values for one
            weight.
        """
        read = partial(self._read, files)
        held: dict[str, Tensor] = {}
        for name, *others in stored:
            if others:
                held[name] = recipe_of[name].make(read)[name]
            for other in others:
                if not torch.equal(held[name], recipe_of[other].make(read)[other]):
                    raise InputError(
                        f"{name!r} and {other!r} are one weight in the model, and have different values in "
                        f"{self.path.name}: untie them, or save the checkpoint again from a model that has them tied"
                    )
        return held

    def _check_dtype(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Raise InputError if no weight has the requested dtype: loading never changes a weight's dtype."""
        own = sorted({str(w.dtype) for w in state.values() if _is_convertible(w.dtype)})
        if self._dtype is not None and own and str(self._dtype) not in own:
            raise InputError(
                f"dtype={self._dtype}: the weights of {type(model).__name__} are {' and '.join(own)}, and loading does "
                f"not change that: give dtype={own[0]}, or build the model in {self._dtype}"
            )

    def _check_kind(self, recipe: Recipe, name: str, found: Tensor, weight: Tensor) -> None:
        """Raise InputError unless a stored weight has the model's shape, and the model's dtype or one to convert.

        `found` is a meta tensor like the stored weight.
        """
        file = self._file_of[recipe.sources[0]].name
        what = f"{name!r} is {found.dtype} {tuple(found.shape)} in {file} and {weight.dtype} {tuple(weight.shape)}"
        if found.shape != weight.shape:
            raise InputError(f"{what} in the model: build the model like the checkpoint's")
        if found.dtype == weight.dtype:
            return
        if not (_is_convertible(found.dtype) and _is_convertible(weight.dtype)):
            raise InputError(f"{what} in the model, which no dtype= converts: build the model like the checkpoint's")
        if self._dtype != weight.dtype:
            raise InputError(
                f"{what} in the model: dtype={weight.dtype} converts tensors as they are read, and "
                f"model.to({found.dtype}) converts the model to the checkpoint's dtype"
            )


def _is_convertible(dtype: torch.dtype) -> bool:
    """Return whether loading may convert weights of this dtype to another."""
    # One-byte numbers are part of a quantised weight, with scales in other tensors.
    return dtype.is_floating_point and dtype.itemsize > 1


def _find_file(path: Path) -> Path:
    """Return the .safetensors file or index at a path. Raises InputError if the path is ambiguous or missing."""
    if path.is_dir():
        # Prefer an index: its folder also contains the files that it lists.
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
    """Return the file of each tensor in an index. Raises InputError for files outside the index's folder."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = dict(held.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = explain_unreadable(error)
        raise InputError(f"{str(path)!r} is no index of safetensors files (no weight_map): {what}") from error
    # An index is untrusted: a name with a folder in it could lead anywhere.
    for file in files.values():
        if not isinstance(file, str) or PurePosixPath(file).name != file or not os.path.isfile(path.parent / file):
            raise InputError(f"{path.name} names {show(file)}, which is no file in {str(path.parent)!r}: move it there")
    return {name: path.parent / file for name, file in files.items()}


def _make_room(weight: Tensor, device: torch.device) -> Tensor:
    """Return a tensor to read a weight's values into: the weight, or new memory on `device` if it is on meta."""
    if not weight.is_meta:
        return weight
    return torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=_choose_place(weight, device))


def _fill(uses: Iterable[tuple[Tensor, CopiedPart]], value: Tensor) -> None:
    """Copy a stored tensor to its places in weights. `uses`: pairs of a weight and the part of it that is copied."""
    for weight, part in uses:
        part.place(weight).copy_(part.take(value))


def _choose_place(weight: Tensor, device: torch.device) -> torch.device:
    """Return the device for a weight. A weight without values that belongs to no stage gets host memory."""
    return torch.device("cpu") if device.type == "meta" else device


def _give(weight: Tensor, value: Tensor, device: torch.device) -> None:
    """Set a weight to `value`. The weight stays the same object, since optimizers may hold it.

    A weight without values takes over the value's memory if dtype, device and strides agree. Otherwise the value is
    copied.
    """
    if not weight.is_meta:
        weight.copy_(value)
        return
    place = _choose_place(weight, device)
    if (value.dtype, value.device, value.stride()) == (weight.dtype, place, weight.stride()):
        exchange(weight, dress_like(weight, value))
    else:
        exchange(weight, fill_like(weight, value, place, weight.dtype))
