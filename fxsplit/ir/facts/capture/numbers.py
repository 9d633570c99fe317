"""Numbers: Python numbers that are inputs of the graph, and are read again for every call.

A number that forward() reads becomes a constant of the graph. If the number has changed, and forward() does nothing but
arithmetic with it, the number is *followed*: a new graph gets a placeholder for it after the tensors' placeholders. Its
default is the value during the capture, so a graph that is run on tensors only uses that value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx

from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.capture.python_state import ARGUMENT, NumberPlace, Place, PythonState, same
from fxsplit.ir.graph import IR
from fxsplit.torch_internals.scopes.undo import restore_after

Known = tuple[float, float]
"""Two different values that a number has had, one after the other."""


def find_arguments(earlier: Iterable[IR], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Known]:
    """Return the numbers among a call's arguments that may be inputs of a new graph, with two values of each.

    Such a number is an input of an `earlier` graph of the model, or has changed since, and no attempt to make it an
    input has failed.
    """
    found: dict[str, Known] = {}
    for ir in earlier:
        state, inputs = ir[PythonState], ir[Example].inputs
        followed = {number.place.key: number.known for number in state.followed}
        for name, (then, now) in inputs.find_numbers(args, kwargs).items():
            key = (ARGUMENT, name)
            if key in followed:
                found[name] = followed[key]
            elif key not in state.stuck and not same(then, now):
                found[name] = (then, now)
    return found


def find_reads(earlier: Iterable[IR]) -> list[NumberPlace]:
    """Return the numbers, other than arguments, that forward() reads and that may be inputs of a new graph.

    Each comes once.
    """
    return [*{number.place.key: number for ir in earlier for number in ir[PythonState].list_numbers()}.values()]


def name_candidates(ir: IR, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[str]:
    """Return words for all numbers, arguments or not, that may be inputs of a new graph."""
    reads = {number.place.name for number in find_reads([ir])}
    return reads | {f"argument {name!r}" for name in find_arguments([ir], args, kwargs)}


def list_number_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the placeholders of numbers. Only these have a default."""
    return [node for node in graph.find_nodes(op="placeholder") if node.args]


def set_numbers(gm: fx.GraphModule, values: Iterable[Any]) -> None:
    """Set the values that a graph uses for its numbers if it is run on tensors only."""
    for node, value in zip(list_number_nodes(gm.graph), values, strict=True):
        node.args = (value,)
    gm.recompile()


def name_numbers(numbers: Sequence[NumberPlace], taken: Iterable[str]) -> list[str]:
    """Return a name for the placeholder of each number, such as `rate` for the attribute 'body.rate'."""
    names = dict.fromkeys(taken)
    before = len(names)
    for number in numbers:
        words = re.findall(r"[A-Za-z_]\w*", number.place.name.partition("'")[2].partition("'")[0])
        name = words[-1] if words else "number"
        while name in names:
            name += "_"
        names[name] = None
    return list(names)[before:]


@contextmanager
def hold_numbers(numbers: Sequence[NumberPlace], values: Iterable[Any]) -> Iterator[None]:
    """Write other values to the places of numbers inside the block."""
    before = [(number.place, number.place.read()) for number in numbers]

    def put_back() -> None:
        for place, value in before:
            _write(place, value)

    with restore_after(put_back):
        for (place, _), value in zip(before, values, strict=True):
            _write(place, value)
        yield


def _write(place: Place, value: Any) -> None:
    """Set the value of a writable place."""
    assert place.write is not None, place.name
    place.write(value)
