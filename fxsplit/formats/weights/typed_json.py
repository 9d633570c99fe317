"""JSON with types: a tree of plain JSON, plus notes with the original types of values.

JSON has only text keys and no tuples. So `{"milestones": Counter({3: 1})}` becomes the tree `{"milestones": [[3, 1]]}`
with the note `[["milestones"], "Counter"]`. Notes are stored separately from the tree: no user value can be mistaken
for a note, and values of JSON types remain plain JSON.
"""

from __future__ import annotations

import copy
import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.formats.weights.save_safetensors import NAMES
from fxsplit.system.figures import show

LARGEST = 1_000_000
"""The most numbers in a tensor: JSON takes about 20 bytes for each."""
Notes = list[list[Any]]
"""A pair for each value of a type that JSON lacks: the path of keys to the value in the tree, and its type's name."""
PLAIN = (str, int, float, bool, type(None))
PAIRS: dict[type, str] = {dict: "dict", Counter: "Counter", OrderedDict: "OrderedDict"}
"""Dict types that are stored as lists of pairs, with their names. A dict with only text keys is a JSON object."""
FACTORIES: dict[str, Any] = {"none": None} | {made.__name__: made for made in (int, float, str, list, dict, set, tuple)}
"""The factories of a defaultdict, by the word after "defaultdict" in a note."""
NUMBERS = {f"numpy {name}": np.dtype(name).type for name in ("bool", "float16", "float32", "float64")} | {
    f"numpy {kind}{bits}": np.dtype(f"{kind}{bits}").type for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}
TENSORS = {
    f"Tensor {name}": dtype
    for dtype, name in NAMES.items()
    if not dtype.is_complex and (dtype.itemsize > 1 or not dtype.is_floating_point)
}
"""Name of a tensor's type in a note -> its dtype, for dtypes that JSON reproduces bit for bit."""


def encode(value: Any, what: str) -> tuple[Any, Notes]:
    """Return the tree and the notes of a value. Later changes to the value do not change them.

    what: the value's name in errors. Raises InputError, with the name, for a part that JSON cannot reproduce.
    """
    notes: Notes = []
    try:
        tree = _encode(value, [], notes, what)
        json.dumps(tree)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{what} cannot be stored as JSON: {error}") from error
    return tree, notes


def _encode(value: Any, path: list[Any], notes: Notes, what: str) -> Any:
    """Return the tree of the value at `path`, and add its notes to `notes`. `what` names the value in errors."""
    kind = type(value)
    if kind in PLAIN:
        return value

    def go(part: Any, name: str, *keys: Any) -> Any:
        return _encode(part, [*path, *keys], notes, name)

    if kind is dict and all(type(key) is str for key in value):
        return {key: go(part, f"{what}[{key!r}]", key) for key, part in value.items()}
    if kind in (list, tuple):
        if kind is tuple:
            notes.append([path, "tuple"])
        return [go(part, f"{what}[{n}]", n) for n, part in enumerate(value)]
    if isinstance(value, np.generic) and f"numpy {value.dtype.name}" in NUMBERS:
        notes.append([path, f"numpy {value.dtype.name}"])
        return value.item()
    if kind in PAIRS or kind is defaultdict:
        notes.append([path, PAIRS.get(kind) or f"defaultdict {_name_factory(value, what)}"])
        return [
            [go(key, f"a key of {what}", n, 0), go(part, f"{what}[{key!r}]", n, 1)]
            for n, (key, part) in enumerate(value.items())
        ]
    if kind is Tensor and f"Tensor {NAMES.get(value.dtype)}" in TENSORS and _is_plain(value):
        if value.numel() > LARGEST:
            raise InputError(
                f"{what} is a tensor of {value.numel()} numbers, and JSON keeps {LARGEST} at most: make it a buffer "
                "of the saved module"
            )
        notes.append([path, f"Tensor {NAMES[value.dtype]}"])
        return [list(value.shape), value.flatten().tolist()]
    raise InputError(
        f"{what} is {show(value)}, a {kind.__name__}, and a checkpoint cannot hold it: it keeps numbers, texts, None, "
        "lists, tuples, dicts, and tensors without gradients; give the parts of it"
    )


def _name_factory(value: defaultdict[Any, Any], what: str) -> str:
    """Return the word that stands for a defaultdict's factory in a note. Raises InputError if there is no such word."""
    name = next((name for name, made in FACTORIES.items() if made is value.default_factory), None)
    if name is None:
        raise InputError(
            f"{what} is a defaultdict of {show(value.default_factory)}, which is code, and a checkpoint holds data: "
            f"give dict(...) of it, or a defaultdict of {', '.join(list(FACTORIES)[1:])} or None"
        )
    return name


def _is_plain(value: Tensor) -> bool:
    """Return whether a tensor is nothing but its numbers: strided, with values, and without gradients."""
    return value.layout == torch.strided and not value.is_meta and not value.requires_grad


def decode(tree: Any, notes: Iterable[Any]) -> Any:
    """Return the value of a tree and its notes; neither is changed. Raises ValueError if the notes do not fit."""
    box = [copy.deepcopy(tree)]
    try:
        # Convert inner values first, since a tuple cannot change later.
        for path, kind in sorted(notes, key=lambda note: -len(note[0])):
            parent: Any = box
            keys = [0, *path]
            for key in keys[:-1]:
                parent = parent[_check_key(parent, key)]
            key = _check_key(parent, keys[-1])
            parent[key] = _find_maker(kind)(parent[key])
    except (TypeError, LookupError, RuntimeError, OverflowError, RecursionError) as error:
        raise ValueError(f"notes of types do not fit: {error}") from error
    return box[0]


def _check_key(parent: Any, key: Any) -> Any:
    """Return `key` if the list or dict `parent` can have such a key. Raises ValueError otherwise."""
    fits = isinstance(parent, dict) if type(key) is str else isinstance(parent, list) and type(key) is int
    if not fits or (type(key) is int and key < 0):
        raise ValueError(f"a note of a type refers to {show(key)}, which does not exist")
    return key


def _find_maker(kind: Any) -> Callable[[Any], Any]:
    """Return the function that makes a value of a type from its tree. Raises ValueError for an unknown type."""
    for known, name in PAIRS.items():
        if kind == name:
            return lambda tree: known(_make_dict(tree))
    if kind == "tuple":
        return _make_tuple
    if kind in NUMBERS:
        return partial(_make_number, NUMBERS[kind])
    if kind in TENSORS:
        return partial(_make_tensor, TENSORS[kind])
    word, _, factory = str(kind).partition(" ")
    if word == "defaultdict" and factory in FACTORIES:
        return lambda tree: defaultdict(FACTORIES[factory], _make_dict(tree))
    raise ValueError(f"a note has the unknown type {show(kind)}")


def _make_dict(tree: Any) -> dict[Any, Any]:
    found = dict(_check_list(tree))
    if len(found) < len(tree):
        raise ValueError("a dict has a key twice")
    return found


def _make_tuple(tree: Any) -> tuple[Any, ...]:
    return tuple(_check_list(tree))


def _make_number(kind: Any, tree: Any) -> Any:
    if not isinstance(tree, (bool, int, float)):
        raise ValueError(f"{show(tree)} is no number")
    return kind(tree)


def _make_tensor(dtype: torch.dtype, tree: Any) -> Tensor:
    shape, numbers = _check_list(tree)
    return torch.tensor(_check_list(numbers), dtype=dtype).reshape(_check_list(shape))


def _check_list(tree: Any) -> list[Any]:
    if not isinstance(tree, list):
        raise ValueError(f"{show(tree)} is no list")
    return tree
