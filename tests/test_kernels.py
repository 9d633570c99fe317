"""Kernels: compiled or not, the same chains come out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from fxsplit import kernels
from fxsplit.costs import Costs
from fxsplit.machine import Machine
from fxsplit.planner import Options
from fxsplit.planning import Planner
from fxsplit.plans import COST_MODELS
from tests.graphs import machines, node, profiles
from tests.test_cost_models import solve


@pytest.fixture
def plain() -> Iterator[None]:
    yield
    kernels.prefer_compiled(False)


@pytest.mark.parametrize("model", COST_MODELS)
@pytest.mark.parametrize("use_all", [True, False])
def test_compiled_plans_are_the_same(plain: None, model: str, use_all: bool) -> None:
    """Not only the objective: every stage, so that a plan does not depend on what the process did before."""

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(profiles(7), machines())
    def check(costs: Costs, machine: Machine) -> None:
        found = []
        for compiled in (False, True):
            kernels.prefer_compiled(compiled)
            plan = solve(costs, machine, Options(model=model, use_all=use_all))
            found.append(plan and (plan.stages, plan.lower_bound_ms))
        assert found[0] == found[1]

    check()


def test_enumeration_stops_at_the_cap_when_compiled(plain: None) -> None:
    costs = Costs(tuple(node(f"n{i}") for i in range(12)), (), ("n0",), rows=1)
    kernels.prefer_compiled()
    whole, _ = Planner(costs, max_states=4096).lattice(Machine.planned(2))
    part, _ = Planner(costs, max_states=4095).lattice(Machine.planned(2))
    assert whole.complete and len(whole) == 4096
    assert not part.complete and len(part) == 13
