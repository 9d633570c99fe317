"""Numbers among the arguments of a call, which may be inputs of the graph as tensors are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from fxsplit.ir.facts.capture.python_state import ARGUMENT, Place
from fxsplit.torch_internals.nn.objects import VALUES, same_constant

NUMBERS = (int, float)
"""Types of numbers that may be inputs of a graph: what is no bool, and of no class of the user's own."""


@dataclass(eq=False)
class NumberSpec:
    """One number among the arguments that is an input of the graph, or is to be one; `value` is that of the example."""

    name: str
    value: Any

    @property
    def place(self) -> Place:
        """The value as a place: while a graph is made, calls have something else there that stands for it."""
        put = partial(setattr, self, "value")
        return Place(f"argument {self.name!r}", partial(getattr, self, "value"), put, (ARGUMENT, self.name))


def is_taken_in_way(leaf: Any, value: Any) -> bool:
    """Return whether two values that are no tensors belong to one way of calling a model.

    Those that say how it is called, as None, True and texts do, must be the same. A number may be any.
    """
    leaf = leaf.value if isinstance(leaf, NumberSpec) else leaf
    if type(leaf) in NUMBERS or type(value) in NUMBERS:
        return type(leaf) in NUMBERS and type(value) in NUMBERS
    plain = (*VALUES, Enum)
    if isinstance(leaf, plain) or isinstance(value, plain):
        return same_constant(leaf, value)
    return True


def is_taken(leaf: Any, value: Any) -> bool:
    """Return whether a graph takes a value that is no tensor in the place of a leaf."""
    return type(value) is type(leaf.value) if isinstance(leaf, NumberSpec) else same_constant(leaf, value)
