"""Numbers among the arguments of a call. They may be inputs of the graph, as tensors are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from fxsplit.ir.facts.capture.python_state import ARGUMENT, Place
from fxsplit.torch_internals.nn.objects import VALUES, same_constant

NUMBERS = (int, float)
"""Types of numbers that may be inputs of a graph. bool and the user's own classes may not."""


@dataclass(eq=False)
class NumberSpec:
    """A number among the arguments that is, or may become, an input of the graph.

    value: the number in the example.
    """

    name: str
    value: Any

    @property
    def place(self) -> Place:
        """The place of the number in the arguments. A capture puts a stand-in there and calls the model with it."""
        put = partial(setattr, self, "value")
        return Place(f"argument {self.name!r}", partial(getattr, self, "value"), put, (ARGUMENT, self.name))


def is_taken_in_way(leaf: Any, value: Any) -> bool:
    """Return whether two values that are not tensors may be in calls of the same form.

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
    """Return whether a graph that was captured with `leaf` accepts `value` in its place. Neither is a tensor."""
    return type(value) is type(leaf.value) if isinstance(leaf, NumberSpec) else same_constant(leaf, value)
