"""The partition pass by itself: the only even cut of a chain, and more stages than parts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import FxsplitWarning
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.passes.order import Order
from fxsplit.passes.partition import Partition
from fxsplit.planner import antichains
from fxsplit.schedule.generators.catalogue import ScheduleName
from tests.support.graphs import ir_of, node, workload
from tests.support.models import FAST


def test_a_chain_is_cut_where_both_stages_take_as_long() -> None:
    costs = Costs((node("a", ms=1.0), node("b", ["a"], 2.0), node("c", ["b"], 3.0)), (), ("c",), rows=1)
    machine = Machine.planned(2)
    ir = Order()(ir_of(costs, antichains(costs, 100), machine, workload(machine)))
    plan = Partition()(ir)[Plan]
    # 1 + 2 ms forward on one device and 3 ms on the other, and twice that backward.
    assert [s.nodes for s in plan.stages] == [("a", "b"), ("c",)] and plan.bottleneck_ms == 9.0 and plan.optimal


@pytest.mark.parametrize(
    "schedule", ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "ZB-H1", "ZBVZeroBubble", "Chimera"]
)
@pytest.mark.parametrize("parts", [1, 2])
def test_more_stages_than_parts_train_as_the_model(schedule: ScheduleName, parts: int) -> None:
    """Once a model that no second device can help with was refused."""
    model = nn.Sequential(nn.Linear(4, 4), *[nn.Tanh()] * (parts - 1)).double()
    unsplit, (x, y) = copy.deepcopy(model), torch.randn(2, 8, 4, dtype=torch.float64)
    with (
        pytest.warns(FxsplitWarning, match=r"some stages only pass values on.* only [12] nodes that cuts can separate"),
        fxsplit.compile(
            model, 4, example_inputs=x, n_microbatches=4, schedule=schedule, passes=FAST, loss_fn=F.mse_loss
        ) as pipe,
    ):
        assert sum(bool(stage.nodes) for stage in pipe.plan.stages) <= parts
        loss, expected = pipe.step(x, target=y), F.mse_loss(unsplit(x), y)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(pipe(x), unsplit(x))
    for a, b in zip(model.parameters(), unsplit.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
