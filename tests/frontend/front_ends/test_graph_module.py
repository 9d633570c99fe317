"""A GraphModule of the user's own becomes the same nodes with one placeholder for each tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxsplit.errors import TraceError
from fxsplit.frontend.front_ends.graph_module import GivenGraph
from tests.frontend.subjects import Scale, make_subject, trace


class Shifts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scale()

    def forward(self, x: Tensor, extra: dict[str, Any]) -> Tensor:
        out: Tensor = self.inner(x) * extra["gain"] + extra["shift"]
        return out


def test_tensors_become_placeholders_and_numbers_constants() -> None:
    given = trace(Shifts())
    x, shift = torch.ones(6, 4), torch.full((6, 4), 0.5)
    graph = GivenGraph().attempt(make_subject(given, x, {"gain": 3.0, "shift": shift}))
    assert graph.scope.front_end == "graph_module" and not graph.scope.fixed
    assert [n.name for n in graph.gm.graph.find_nodes(op="placeholder")] == ["x", "extra_shift"]
    assert torch.equal(graph.gm(x, shift), x * 2 * 3 + 0.5)
    assert graph.gm.get_parameter("inner.scale") is given.get_parameter("inner.scale"), "weights are the user's own"
    assert graph.gm is not given and len(given.graph.find_nodes(op="placeholder")) == 2, "the given graph is left alone"


def test_only_graphs_that_are_called_like_modules_are_taken() -> None:
    assert GivenGraph.takes(trace(Scale())) and not GivenGraph.takes(Scale())
    exported = torch.export.export(Scale(), (torch.ones(6, 4),), strict=False).module()
    assert isinstance(exported, fx.GraphModule) and not GivenGraph.takes(exported)


def test_a_graph_that_was_changed_and_not_recompiled_is_refused() -> None:
    given = trace(Scale())
    with given.graph.inserting_before(next(iter(given.graph.nodes))):
        given.graph.placeholder("extra")
    with pytest.raises(TraceError, match="input 'extra' that its forward"):
        GivenGraph().attempt(make_subject(given))
