"""Stack traces of nodes: the same text, with each line of source read once at most."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from functools import partial

import pytest
from torch import fx

from fxsplit.torch_internals.scopes.patch import patch_method
from fxsplit.torch_internals.tracing.stack_traces import remember_frames
from tests.support.models import Mlp
from tests.torch_internals.tracing.test_symbolic_sizes import count, export


def trace() -> fx.Graph:
    """Return a graph that fx has made, with stack traces."""
    tracer = fx.Tracer()
    tracer.record_stack_traces = True
    return tracer.trace(Mlp())


def list_traces(make: Callable[[], fx.Graph]) -> list[str]:
    return [str(node.stack_trace) for node in make().nodes]


@pytest.mark.parametrize("make", [trace, lambda: export(2).graph], ids=["traced", "exported"])
def test_traces_say_the_same(make: Callable[[], fx.Graph]) -> None:
    plain = list_traces(make)
    with remember_frames():
        assert list_traces(make) == plain
    assert any("forward" in text for text in plain)


def test_source_is_read_where_the_text_shows_it() -> None:
    """A hundred frames of torch's own were read for each node, and left out of its text."""

    def count_reads() -> int:
        reads: list[object] = []
        with patch_method(linecache, "getline", lambda own: partial(count, reads, own)):
            traces = list_traces(lambda: export(2).graph)
        assert sum(map(len, traces)) > 0
        return len(reads)

    plain = count_reads()
    with remember_frames():
        assert 0 < count_reads() < plain / 20
