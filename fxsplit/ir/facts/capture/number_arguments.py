"""Numbers among the arguments of a call, which may be inputs of the graph like tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from fxsplit.ir.facts.capture.python_state import ARGUMENT, Place
from fxsplit.torch_internals.nn.objects import VALUES, same_constant

NUMBERS = (int, float)
"""Types of numbers that may be inputs of a graph: no bool, and no class of the user."""


@dataclass(eq=False)
class NumberSpec:
    """A number among the arguments that is, or may become, an input of the graph; `value` is the example's."""

    name: str
    value: Any

    @property
    def place(self) -> Place:
        """The place at which a capture puts a stand-in for the number, so that calls are made with the stand-in."""
        put = partial(setattr, self, "value")
        return Place(f"argument {self.name!r}", partial(getattr, self, "value"), put, (ARGUMENT, self.name))


def is_taken_in_way(leaf: Any, value: Any) -> bool:
    """Return whether two values, neither a tensor, belong to calls of the same form.

    Values such as None, True and texts select the form, and must be the same. Numbers may differ.
    """
    leaf = leaf.value if isinstance(leaf, NumberSpec) else leaf
    if type(leaf) in NUMBERS or type(value) in NUMBERS:
        return type(leaf) in NUMBERS and type(value) in NUMBERS
    plain = (*VALUES, Enum)
    if isinstance(leaf, plain) or isinstance(value, plain):
        return same_constant(leaf, value)
    return True


def is_taken(leaf: Any, value: Any) -> bool:
    """Return whether a graph takes `value`, which is no tensor, for a leaf."""
    return type(value) is type(leaf.value) if isinstance(leaf, NumberSpec) else same_constant(leaf, value)
