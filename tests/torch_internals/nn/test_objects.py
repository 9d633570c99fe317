"""Objects taken apart and made again."""

from __future__ import annotations

import threading
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fxsplit.errors import InputError
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.nn.objects import ObjectParts, Opaque, StandIn, same_constant, take_apart

Pair = namedtuple("Pair", "left right")


class Slots:
    __slots__ = ("__own", "unset", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.__own = value, 2

    def own(self) -> int:
        return self.__own


@dataclass(frozen=True)
class Derived:
    value: int
    twice: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", 2 * self.value)


class Items(dict):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]


class Ordered(OrderedDict):  # type: ignore[type-arg]
    pass


class Triple(tuple):  # type: ignore[type-arg]
    __slots__ = ()


class Several(list):  # type: ignore[type-arg]
    note = "of the class"


@pytest.mark.parametrize(
    ("value", "leaves"),
    [
        (SimpleNamespace(a=1, b=[2, {"c": 3}]), [1, 2, 3]),
        (UserDict(a=1, b=Pair(2, 3)), [1, 2, 3]),
        (Slots(7), [2, 7]),
        (Derived(3), [3, 6]),
        (Items(a=1, b=2), [1, 2]),
        (Ordered(b=1, a=SimpleNamespace(c=2)), [1, 2]),
        (Triple((4, 5)), [4, 5]),
        (Several([4, 5]), [4, 5]),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({1}), [1]),
    ],
)
def test_objects_are_made_again_with_other_leaves(value: Any, leaves: list[int]) -> None:
    found, structure = pytree.tree_flatten(pytree.tree_map(take_apart, value))
    assert found == leaves and structure == pytree.tree_structure(pytree.tree_map(take_apart, value))
    made = pytree.tree_unflatten([10 * leaf for leaf in found], structure)
    assert type(made) is type(value)
    assert pytree.tree_leaves(pytree.tree_map(take_apart, made)) == [10 * leaf for leaf in leaves]


def test_attributes_are_found_under_their_own_names() -> None:
    found, structure = pytree.tree_flatten(take_apart(Slots(torch.ones(1))))
    made = pytree.tree_unflatten(found, structure)
    assert made.own() == 2 and made.value is found[1] and not hasattr(made, "unset")
    paths = pytree.tree_flatten_with_path(take_apart(Items(a=1)))[0]
    assert [str(path[0]) for path, _ in paths] == ["['a']"]


@pytest.mark.parametrize(
    "value", [1, 1.5, "text", None, b"x", torch.float32, Fraction(1, 2), np.float64(2), torch.relu, nn.ReLU()]
)
def test_constants_stay_themselves(value: Any) -> None:
    assert take_apart(value) is value and same_constant(value, value)


def test_what_cannot_be_taken_apart_is_opaque() -> None:
    for value in (np.ones(3), torch.Generator(), partial(torch.add, 1), iter([1]), threading.Lock()):
        assert take_apart(value) == Opaque(type(value).__qualname__, inside=False)
    loop = SimpleNamespace(x=1)
    loop.self = loop
    assert pytree.tree_leaves(take_apart(loop)) == [1, Opaque("SimpleNamespace", inside=True)]
    assert take_apart(SimpleNamespace(array=np.ones(2))).attributes["array"] == Opaque("ndarray", inside=True)
    assert isinstance(take_apart(Slots(1).own), Opaque) and not isinstance(
        take_apart(nn.ReLU().forward), (Opaque, ObjectParts)
    )


def test_constants_are_compared_by_what_they_are() -> None:
    """A user's __eq__ was called, which may return anything; and 0.0 == -0.0 is true."""

    class Equal:
        def __eq__(self, other: object) -> bool:
            return True

    assert same_constant(2.0, 2.0) and same_constant(float("nan"), float("nan"))
    for a, b in ((1, True), (0.0, -0.0), (2.0, np.float64(2.0)), (Equal(), Equal()), (torch.relu, torch.tanh)):
        assert not same_constant(a, b)


def test_a_stand_in_refuses_to_be_read() -> None:
    stand_in: Any = StandIn(Opaque("lock", inside=True, name="batch_lock"))
    assert take_apart(stand_in) is stand_in
    for read in (
        bool,
        len,
        list,
        float,
        str,
        lambda s: s.acquire,
        lambda s: s == 1,
        lambda s: isinstance(s, int),
        lambda s: s + 1,
    ):
        with pytest.raises(InputError, match="argument 'batch_lock' is a lock, which"):
            read(stand_in)


def test_a_block_mask_is_refused_with_what_to_do() -> None:
    """Once the advice was to keep a module whole, which could not be handed the mask either."""

    # It stands for torch's, which takes seconds to import.
    found = take_apart(type("BlockMask", (), {})())
    assert isinstance(found, Opaque) and "call create_block_mask in the attention submodule" in found.explain()
