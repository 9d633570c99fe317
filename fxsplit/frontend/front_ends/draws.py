"""Draws of random numbers that a graph would keep from call to call: refused, unless they change nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from fxsplit.errors import TraceError
from fxsplit.frontend.graph import Graph, same_graph
from fxsplit.torch_internals.random.generators import keep_generators, read_python_generators, set_next_draws

TRIED = (0, 2**31, 2**32 - 1)
"""Words that draws come from in other captures: shares of 0, a half and nearly 1; the first index and later ones."""


@contextmanager
def refuse_draws(model: nn.Module, states: Callable[[], Any]) -> Iterator[None]:
    """Raise TraceError where the block draws random numbers, which would be constants of the graph.

    `states` reads the states of the generators that count; a draw changes one of them.
    """
    before = states()
    yield
    if states() != before:
        _refuse(model)


def capture_alike(model: nn.Module, capture: Callable[[Callable[[], None]], Graph]) -> Graph:
    """Return the graph that `capture` returns; raises TraceError where it depends on a draw of Python's or numpy's.

    Code may draw for itself, as a library that checks the types of a few items of a list. So where the model draws, it
    is captured again with draws from one end to the other. `capture` calls what it is given once forward() has run,
    before it puts generators back.
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
                # It had not failed before.
                _refuse(model)
            if not same_graph(found.gm, other.gm):
                _refuse(model)
    return found


def _refuse(model: nn.Module) -> NoReturn:
    raise TraceError(
        f"forward() of {type(model).__name__} draws random numbers that do not depend on its inputs, which a graph "
        "would keep from call to call: draw like an input, torch.randn_like(x), or hand them to the model"
    )
