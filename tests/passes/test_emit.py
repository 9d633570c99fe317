"""Dropout in a pipeline: reproducible by seed, the same wherever the graph is cut, right in distribution."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxsplit
from fxsplit import IR, Plan
from fxsplit.api.verify.compare import compare, run_pipeline_step
from fxsplit.errors import PlanError
from fxsplit.ir.chain import to_chain
from fxsplit.ir.facts.capture.effects import Effects
from fxsplit.passes import PASSES
from tests.support.models import FAST


class Drops(nn.Module):
    """Drops as a module (used twice), as a function, and inside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.a(x)))
        x = self.drop(torch.tanh(self.b(x)))
        x = F.dropout(x, 0.25, training=self.training)
        q = self.c(x).unsqueeze(1)
        result: Tensor = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5 if self.training else 0.0).squeeze(1)
        return result


@pytest.mark.parametrize("devices", [2, 3])
def test_the_same_draws_on_any_number_of_devices(devices: int) -> None:
    """One stage on one device is the reference: outputs and gradients are equal with dropout on, seed by seed."""
    model = Drops().double()
    x, y = torch.randn(9, 8, dtype=torch.float64), torch.randn(9, 8, dtype=torch.float64)
    outcomes = {}
    for count in (1, devices):
        with fxsplit.compile(
            copy.deepcopy(model), count, n_microbatches=3, loss_fn=F.mse_loss, passes=FAST, example_inputs=x
        ) as pipe:
            for seed in (1, 2, 1):
                torch.manual_seed(seed)
                pipe.zero_grad()
                outcomes[count, seed] = run_pipeline_step(pipe, [x], y)
    for seed in (1, 2):
        assert compare(outcomes[devices, seed], outcomes[1, seed]).largest <= 1e-12
    assert compare(outcomes[1, 1], outcomes[1, 2]).output > 0.1


def test_microbatches_and_nodes_draw_differently() -> None:
    model = nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Identity())
    with fxsplit.compile(model, 3, n_microbatches=4, passes=FAST) as pipe:
        out = pipe(torch.ones(4 * 500, 8))
        rows = out.view(4, -1)
        assert len({tuple(row.tolist()) for row in rows}) == 4
        assert set(out.unique().tolist()) == {0.0, 2.0}
        assert 0.45 < float((out == 0).float().mean()) < 0.55


def test_eval_draws_nothing_and_a_pipeline_compiled_in_eval_still_drops_reproducibly() -> None:
    model = Drops().eval()
    x = torch.randn(8, 8)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        assert torch.equal(pipe(x), pipe(x))
        pipe.train()
        results = []
        for _ in range(5):
            torch.manual_seed(7)
            results.append(pipe(x))
        assert all(torch.equal(r, results[0]) for r in results)
        assert not torch.equal(pipe(x), results[0])


def test_the_callers_generator_moves_on_by_one_draw() -> None:
    with fxsplit.compile(Drops(), 2, example_inputs=torch.randn(8, 8), passes=FAST) as pipe:
        torch.manual_seed(3)
        pipe(torch.ones(8, 8))
        after = torch.rand(2)
        torch.manual_seed(3)
        torch.randint(2**62, ())
        assert torch.equal(torch.rand(2), after)


def test_a_model_that_draws_nothing_leaves_the_generator_alone() -> None:
    with fxsplit.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), 2, passes=FAST) as pipe:
        state = torch.get_rng_state()
        pipe(torch.ones(8, 8)).sum().backward()
        assert torch.equal(torch.get_rng_state(), state)


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


class SometimesNoisy(nn.Module):
    """Draws in training through a module that is no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.noise, self.b = nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.noise(self.a(x)))
        return result


def test_what_draws_only_in_the_second_mode_is_reproducible() -> None:
    model = SometimesNoisy().eval()
    x = vectors(32)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        pipe.train()
        runs = []
        for _ in range(2):
            torch.manual_seed(3)
            runs.append(pipe(x).detach())
        assert torch.equal(*runs)


@pytest.mark.parametrize("where", ["profile", "order", "partition"])
def test_a_pass_that_rewrites_the_graph_keeps_the_draws(where: str) -> None:
    """Nodes were seeded only while Costs was known, which a rewriting pass drops: masks then differed silently."""

    def tidy(ir: IR) -> IR:
        return ir.rewrite(ir.gm, *(kind for kind in ir.facts if kind is not Effects))

    def forget_costs(ir: IR) -> IR:
        return ir.rewrite(ir.gm, Plan)

    model, x = Drops(), torch.randn(8, 8)
    chain = to_chain(FAST, PASSES)
    added = forget_costs if where == "partition" else tidy
    found = []
    for devices, passes in ((2, chain), (2, chain.after(where, added)), (1, chain.after(where, added))):
        with fxsplit.compile(copy.deepcopy(model), devices, n_microbatches=4, passes=passes, example_inputs=x) as pipe:
            torch.manual_seed(7)
            found.append(pipe(x).detach())
            torch.manual_seed(7)
            assert torch.equal(pipe(x), found[-1])
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[1], found[2], rtol=1e-6, atol=1e-6)


def test_a_node_that_a_pass_adds_behind_partition_is_named() -> None:
    """The user got a bare KeyError: a node that no stage has was looked up in the plan."""

    def scale(ir: IR) -> IR:
        graph = fx.Graph()
        value = graph.graph_copy(ir.gm.graph, {})
        graph.output(graph.call_function(torch.mul, (value, 2.0)))
        return ir.rewrite(fx.GraphModule(ir.gm, graph), Plan)

    scale.tolerance = float("inf")  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match="node 'mul' is in no stage of the plan: add nodes before 'profile'"):
        fxsplit.compile(
            Drops(), 2, example_inputs=torch.randn(8, 8), passes=to_chain(FAST, PASSES).after("partition", scale)
        )
