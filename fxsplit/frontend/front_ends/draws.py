"""Refuse random numbers that a graph would keep as constants, unless the graph does not depend on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from fxsplit.errors import TraceError
from fxsplit.frontend.graph import Graph, same_graph
from fxsplit.torch_internals.random.generators import keep_generators, read_python_generators, set_next_draws

TRIED = (0, 2**31, 2**32 - 1)
"""The 32-bit words that generators return in further captures: as random shares, these are 0, a half and nearly 1."""


@contextmanager
def refuse_draws(model: nn.Module, states: Callable[[], Any]) -> Iterator[None]:
    """Raise TraceError if the block draws random numbers, since they would be constants of the graph.

    states: reads the states of the relevant generators; a draw changes a state.
    """
    before = states()
    yield
    if states() != before:
        _refuse(model)


def capture_alike(model: nn.Module, capture: Callable[[Callable[[], None]], Graph]) -> Graph:
    """Return the graph of `capture`.

    Raises TraceError if the graph depends on a draw of Python's or numpy's generators.
    Code may draw for its own purposes, like a library that checks the types of a few items of a list. So if the model
    draws, it is captured again with very different random numbers, and the graphs are compared.
    capture: makes the graph. It gets a function to call after forward() has run, before generators are restored.
    """
    before, drew = read_python_generators(), list[bool]()
    found = capture(lambda: drew.append(read_python_generators() != before))
    if not any(drew):
        return found
    with keep_generators():
        for word in TRIED:
            set_next_draws(word)
            try:
                other = capture(lambda: None)
            except TraceError:
                # The first capture did not fail.
                _refuse(model)
            if not same_graph(found.gm, other.gm):
                _refuse(model)
    return found


def _refuse(model: nn.Module) -> NoReturn:
    raise TraceError(
        f"forward() of {type(model).__name__} draws random numbers that do not depend on its inputs, which a graph "
        "would keep from call to call: draw like an input, torch.randn_like(x), or hand them to the model"
    )
