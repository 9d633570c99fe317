"""An encoded value comes back unchanged, with its types, or is refused by name."""

from __future__ import annotations

import enum
import json
import random
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxsplit.errors import InputError
from fxsplit.formats.weights.typed_json import decode, encode


def is_same(a: Any, b: Any) -> bool:
    """Return whether two values are equal, with the types of all their parts, and the order of dicts."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        made = getattr(a, "default_factory", 0) is getattr(b, "default_factory", 0)
        return made and is_same([*a.items()], [*b.items()])
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)


KEPT: list[Any] = [
    {"plain": [1, 2.5, "text", None, True, {"inside": []}], "inf": float("inf"), "": {"": ()}},
    {1: 0.5, 2: 0.25},
    {1: "a", "1": "b"},
    {None: 1, True: 2, 0.5: 3, (1, ("x", None)): [(4,)]},
    Counter({5: 2, 3: 1}),
    defaultdict(int, a=1),
    defaultdict(list, {1: [2]}),
    defaultdict(None, a=1),
    OrderedDict(b=1, a=2),
    (1, [(2, {"k": (3,)})]),
    random.Random(0).getstate(),
    [np.float64(1.5), np.float32(0.1), np.int64(-3), np.uint8(7), np.bool_(True)],
    torch.tensor(0.1),
    torch.zeros(0, 3),
    torch.arange(6, dtype=torch.uint8).reshape(2, 3).T,
    torch.tensor([True, False]),
    torch.tensor([0.1, float("inf")], dtype=torch.bfloat16),
    torch.tensor(1 / 3, dtype=torch.float64),
    "\ud800",
    10**50,
]


@pytest.mark.parametrize("value", KEPT, ids=lambda v: type(v).__name__)
def test_what_is_kept_comes_back_as_it_was(value: Any) -> None:
    text = json.dumps(encode({"s": value}, "extra"))
    tree, notes = json.loads(text)
    assert is_same(decode(tree, notes), {"s": value})
    assert json.dumps([tree, notes]) == text, "the tree and its notes stay as they are"
    tree, notes = encode(value, "extra")  # also at the top
    assert is_same(decode(tree, notes), value)


def test_what_json_knows_is_plain_json() -> None:
    value = {"a": [1, {"b": None}], "fxsplit": "Counter", "notes": [[["a"], "tuple"]]}
    assert encode(value, "extra") == (value, [])


def test_a_tree_shares_nothing_with_the_value() -> None:
    value = {"a": [1], "b": Counter({1: 2})}
    tree, notes = encode(value, "extra")
    value["a"].append(2)  # type: ignore[attr-defined]
    value["b"][1] += 1  # type: ignore[index]
    assert decode(tree, notes) == {"a": [1], "b": {1: 2}}


class Odd(dict[str, int]):
    pass


class Pair(NamedTuple):
    x: int


class Level(enum.IntEnum):
    LOW = 1


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Odd(), r"extra\['s'\] is {}, a Odd, and a checkpoint cannot hold it"),
        (Level.LOW, r"extra\['s'\] is <Level.LOW: 1>, a Level"),
        (Pair(1), "a Pair"),
        ({1, 2}, "a set"),
        (b"x", "a bytes"),
        (1j, "a complex"),
        ([1, {"k": {(1, object()): 2}}], r"a key of extra\['s'\]\[1\]\['k'\]\[1\] is <object"),
        (defaultdict(lambda: 1), r"extra\['s'\] is a defaultdict of <function .* which is code"),
        (nn.Parameter(torch.ones(1)), "a Parameter"),
        (torch.ones(1, requires_grad=True), "tensors without gradients"),
        (torch.zeros(2, device="meta"), "a Tensor"),
        (torch.zeros(1, dtype=torch.complex64), "a Tensor"),
        (torch.eye(2).to_sparse(), "a Tensor"),
        (torch.zeros(1000, 1001), r"extra\['s'\] is a tensor of 1001000 numbers, .* a buffer of the saved module"),
        (np.ones(2), "a ndarray"),
        (LOOP, "extra cannot be stored as JSON"),
        (10**5000, "extra cannot be stored as JSON"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_would_not_come_back_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        encode({"s": value}, "extra")


@pytest.mark.parametrize(
    "notes",
    [
        3, [3], [[]], [["a"]], [[["a"], "code"]], [[["a"], 3]], [[["gone"], "tuple"]], [[[0], "tuple"]],
        [[["a", -1], "tuple"]], [[["a", True], "tuple"]], [[["a", 9], "tuple"]], [[["b"], "tuple"]],
        [[["a"], "dict"]], [[["a"], "numpy float64"]], [[["a"], "Tensor F32"]], [[["pairs"], "dict"]],
        [[["pairs"], "defaultdict eval"]], [[["tensor"], "Tensor F32"]], [[["list"], "dict"]], [[[], "tuple"]],
    ],
)  # fmt: skip
def test_notes_that_do_not_fit_are_a_value_error(notes: Any) -> None:
    tree = {"a": [1, 2], "b": "text", "pairs": [[1, 2], [1, 3]], "tensor": [[5], [1.0]], "list": [[[1], 2]]}
    with pytest.raises(ValueError):
        decode(tree, notes)
