"""Parameters that several nodes read: fetched by each, summed once a batch."""

from __future__ import annotations

import copy
from collections import Counter

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.frontend.front_ends.fetches import fetch_apart
from tests.support.times import state_times


class Twice(nn.Module):
    """Reads one weight at its start, as it is and transposed, and at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.scale = nn.Buffer(torch.ones(6))
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of three products."""
        weight, scale = self.weight, self.scale
        inner: Tensor = self.inner(torch.tanh(x @ weight) @ weight.t() * scale)
        return inner @ weight


def test_each_reader_fetches_a_parameter_and_buffers_stay() -> None:
    graph = fx.Graph()
    x, weight, scale = graph.placeholder("x"), graph.get_attr("weight"), graph.get_attr("scale")
    for read in (weight, scale, weight, scale, weight):
        x = graph.call_function(torch.matmul if read is weight else torch.mul, (x, read))
    graph.output(x)
    model, given = Twice(), torch.randn(2, 6)
    gm = fx.GraphModule(model, graph)
    expected = gm(given)
    fetch_apart(gm)
    gm.graph.lint()
    fetched = Counter(str(node.target) for node in gm.graph.find_nodes(op="get_attr"))
    assert fetched == {"weight": 3, "scale": 1}
    assert all(len(n.users) == 1 for n in gm.graph.find_nodes(op="get_attr", sort=True) if n.target == "weight")
    assert torch.equal(gm(given), expected)


def test_a_parameter_that_two_stages_read_crosses_no_cut() -> None:
    """It used to be sent with every microbatch, and its gradient sent back with every microbatch."""
    torch.manual_seed(0)
    model = Twice().double()
    unsplit = copy.deepcopy(model)
    x, y = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    state_times(t=0.01)  # a view takes almost no time, so the cut is after its product
    # A pass may be any function.
    chain = fxsplit.DEFAULT.before("partition", lambda ir: fxsplit.Pins.add(ir, {"inner": 1}))
    for given in (model, fx.symbolic_trace(copy.deepcopy(model))):
        with fxsplit.compile(
            given, ["cpu"] * 2, example_inputs=x, n_microbatches=4, loss_fn=F.mse_loss, passes=chain
        ) as pipe:
            first, last = pipe.plan.stages
            assert last.in_bytes == 2 * 6 * 8 and last.in_gradient_bytes == 2 * 6 * 8, "the values of two rows alone"
            assert first.parameter_bytes and last.parameter_bytes > 6 * 6 * 8, "both have it"
            pipe.step(x, target=y)
            unsplit.zero_grad()
            F.mse_loss(unsplit(x), y).backward()
            for a, b in zip(given.parameters(), unsplit.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)
