"""Compare two profiles of a model: without weights, from shapes, and with weights, measured in steps.

Without weights each operator is timed by itself. *regret* says how much slower the bottleneck of the plan from shapes
is than the bottleneck of the best plan, both by the measured costs.
"""

from __future__ import annotations

from statistics import median

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import fxsplit
from bench.lib.runtime_networks import Case, build
from bench.lib.size import choose

ROUNDS, DEVICES = choose(3, 1), 4


def bottleneck_ms(plan: fxsplit.Plan, costs: fxsplit.Costs) -> float:
    """Return the time of the slowest stage by these costs."""
    # Price the stages of one plan with the costs of the other: this is the time that the plan would really take.
    nodes = ([costs.by_name[name] for name in stage.nodes] for stage in plan.stages)
    return max(sum(n.forward_ms + n.backward_ms for n in stage) for stage in nodes)


@pytest.mark.parametrize("network", choose(["resnet50", "vgg16", "transformer"], ["tiny"]))
def test_from_shapes(benchmark: BenchmarkFixture, network: str) -> None:
    """Take both profiles in turn, on one thread."""
    model, x, _ = build(Case(network, 8, 1))
    with fxsplit.without_weights():
        empty, _, _ = build(Case(network, 8, 1))
    # Costs from shapes assume one thread.
    torch.set_num_threads(1)
    measured, told, regrets = [], [], []
    for _ in range(ROUNDS):
        # In turn, so that a machine that slows down changes both.
        seen, made_up = fxsplit.profile(model, x), fxsplit.profile(empty, x)
        best, other = fxsplit.plan(seen, DEVICES), fxsplit.plan(made_up, DEVICES)
        measured.append(seen.total_ms)
        told.append(made_up.total_ms)
        regrets.append(bottleneck_ms(other, seen) / bottleneck_ms(best, seen) - 1.0)
    benchmark.pedantic(lambda: fxsplit.profile(empty, x, repeats=1), rounds=1)
    benchmark.group = "shapes"
    benchmark.extra_info.update(
        shapes=network, measured_ms=median(measured), told_ms=median(told), regret=median(regrets)
    )
