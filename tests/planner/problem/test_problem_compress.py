"""Plans with compressed cuts are the best of all, by brute force over the definition."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit.errors import PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from tests.support.graphs import best_bottleneck, machines, profiles, try_examples, workload

MADE = ["", "float32[4, 64]", "float32[4, 3]", "float64[2, 5, 16]", "int64[4, 64]", "float16[4, 64]", "tuple"]


@try_examples(60)
@given(profiles(max_nodes=7), machines(max_devices=3), st.sampled_from(["bf16", "int8"]), st.integers(0, 10**6))
@pytest.mark.parametrize("model", ["forwarded", "overlapped"])
def test_plans_are_the_best_of_all(model: str, costs: Costs, machine: Machine, how: str, seed: int) -> None:
    draw = random.Random(seed)
    nodes = tuple(replace(node, made=draw.choice(MADE)) for node in costs.nodes)
    inputs = tuple(replace(given, made=draw.choice(MADE)) for given in costs.inputs)
    costs, options = replace(costs, nodes=nodes, inputs=inputs, compress=how), Options(model=model, use_all=False)
    load = workload(machine)
    best = best_bottleneck(costs, machine, load, options)
    try:
        found = Planner(costs).plan(machine, load, options).bottleneck_ms
    except PlanError:
        assert best is None
        return
    assert best is not None and found == pytest.approx(best, rel=1e-9)
