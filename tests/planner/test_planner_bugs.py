"""Wrong plans that were once made: each must stay right."""

from __future__ import annotations

from math import inf

import pytest

from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.machine import Device, Machine
from fxsplit.ir.facts.price import COST_MODELS
from fxsplit.ir.facts.workload import Workload
from fxsplit.planner import Options, search
from fxsplit.planner.kernels import SMALL
from fxsplit.planner.planner import Planner
from tests.graphs import best_bottleneck, node, workload


def costs(*nodes: object, outputs: tuple[str, ...]) -> Costs:
    return Costs(nodes, (), outputs, rows=1)  # type: ignore[arg-type]


def test_a_number_of_stages_that_does_not_fit_on_one_order_is_not_ruled_out() -> None:
    """Two stages fit only in the order that was not looked at: the bound must leave room for them."""
    two = costs(node("a", kept_bytes=2000), node("b", kept_bytes=100), outputs=("a", "b"))
    machine = Machine((Device("d0", memory_bytes=2500), Device("d1")), (inf,))
    plan = Planner(two, max_states=1).plan(machine, workload(machine), Options(use_all=False))
    assert plan.lower_bound_ms <= 3.0 and (plan.bottleneck_ms == 3.0 or not plan.optimal)


def test_out_of_time_is_not_no_plan() -> None:
    two = costs(node("a"), node("b"), outputs=("a", "b"))
    machine = Machine.planned(2)
    planner = Planner(two, pins={"b": 0})
    assert planner.plan(machine, workload(machine), Options()).bottleneck_ms == 3.0
    with pytest.raises(Exception, match=r"no plan was found within time_limit=1e-09 s: allow more time"):
        planner.plan(machine, workload(machine), Options(time_limit=1e-9))


def test_a_device_that_is_passed_over_may_be_the_better_one() -> None:
    """In the order of the machine, to have used fewer devices is no advantage: the next may be slower."""
    light = tuple(node(f"p{i}", ms=1e-9) for i in range(9))
    three = costs(*light, node("n1", ms=1), node("n2", ms=2), node("n4", ms=3), outputs=("n1",))
    machine = Machine(tuple(Device(f"d{i}", speed=s) for i, s in enumerate((1.0, 0.5, 0.5, 1.0))), (inf,) * 3)
    found = [
        Planner(three).plan(machine, workload(machine), Options(use_all=False, model=model, traffic=False))
        for model in ("forwarded", "direct")
    ]
    assert found[0].n_states > SMALL and found[1].bottleneck_ms == pytest.approx(found[0].bottleneck_ms)


@pytest.mark.parametrize("model", COST_MODELS)
def test_stages_may_be_empty_under_every_model(model: str) -> None:
    long = costs(*(node(f"n{i}", [f"n{i - 1}"] if i else []) for i in range(700)), outputs=("n699",))
    machine = Machine((Device("d0", speed=1e-4), Device("d1")), (inf,))
    idle = Workload("1F1B", 3, {1: (3,), 2: (2, 1)}, may_idle=True)
    assert Planner(long).plan(machine, idle, Options(model=model)).bottleneck_ms == pytest.approx(2100.0)


@pytest.mark.parametrize("model", ["forwarded", "overlapped", "direct"])
def test_the_last_stage_in_use_sends_nothing_on(model: str) -> None:
    one = costs(node("a", output_bytes=1e6, gradient_bytes=1e6), outputs=("a",))
    machine = Machine.planned(2, 1e4)
    idle = Workload("1F1B", 3, {1: (3,), 2: (2, 1)}, may_idle=True)
    plan = Planner(one).plan(machine, idle, Options(model=model, use_all=False))
    assert plan.bottleneck_ms == 3.0 and len(plan.stages) == 1


@pytest.mark.parametrize("model", COST_MODELS)
def test_bounds_of_one_order_know_hosts(model: str) -> None:
    two = costs(node("b", host_ms=0.1), node("a", host_ms=9.0), outputs=("a", "b"))
    machine = Machine((Device("d0"), Device("h", host=True)), (1e6,))
    options = Options(use_all=False, model=model)
    best = best_bottleneck(two, machine, workload(machine), options)
    plan = Planner(two, max_states=1).plan(machine, workload(machine), options)
    assert best is not None and plan.lower_bound_ms <= best * (1 + 1e-9)


@pytest.mark.parametrize("seconds", [1e12, 1e14, 1e300])
def test_any_time_limit_will_do(seconds: float) -> None:
    long = costs(*(node(f"n{i}", [f"n{i - 1}"] if i else []) for i in range(700)), outputs=("n699",))
    machine = Machine.planned(2)
    for model in ("forwarded", "direct"):
        plan = Planner(long).plan(machine, workload(machine), Options(model=model, time_limit=seconds))
        assert plan.optimal and plan.bottleneck_ms == pytest.approx(1050.0)


def test_more_time_never_makes_a_plan_worse() -> None:
    """Where there is no time to look at all nodes, the plan that was found with some joined is kept."""
    from random import Random

    for seed in range(40):
        draw = Random(seed)
        made = [
            node(
                f"n{i}",
                [f"n{draw.randrange(i)}"] if i else [],
                ms=draw.choice([0.0, 0.0, 1.0, 3.0]),
                output_bytes=draw.randrange(1000),
            )
            for i in range(8)
        ]
        graph = costs(*made, outputs=("n7",))
        machine = Machine.planned(3, 1e4)
        whole = Planner(graph).plan(machine, workload(machine), Options())
        hurried = Planner(graph).plan(machine, workload(machine), Options(time_limit=1e-9))
        assert hurried.lower_bound_ms <= whole.bottleneck_ms * (1 + 1e-9)
        joined = Planner(graph)
        idle = joined.plan(machine, workload(machine), Options(use_all=False))
        assert whole.bottleneck_ms >= idle.bottleneck_ms * (1 - 1e-9)


def test_pins_name_devices_in_a_free_order_too() -> None:
    two = costs(node("a"), node("b", ("a",)), outputs=("b",))
    machine = Machine.planned(2)
    plan = Planner(two, pins={"a": 1, "b": 0}).plan(machine, workload(machine), Options(free=True))
    assert [s.devices for s in plan.stages] == [(1,), (0,)]


def test_pins_may_name_two_devices_of_one_replicated_stage() -> None:
    two = costs(node("a"), node("b", ("a",)), outputs=("b",))
    machine = Machine.planned(2)
    planner = Planner(two, pins={"a": 0, "b": 1}, keep=[["a", "b"]])
    plan = planner.plan(machine, workload(machine), Options(model="replicated"))
    assert [s.devices for s in plan.stages] == [(0, 1)]
    with pytest.raises(Exception, match="pin both to one stage"):
        planner.plan(machine, workload(machine), Options(use_all=False))


def test_memory_that_is_missing_is_told_under_direct_sends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By both solvers: tensors have no price where only memory counts."""
    nodes = [node(f"n{i}", [f"n{i - 1}"] if i else [], kept_bytes=100, output_bytes=50) for i in range(6)]
    graph = costs(*nodes, outputs=("n5",))
    machine = Machine.planned(2, 1e3, memory_bytes=300)
    told = []
    for small in (600, 0):
        monkeypatch.setattr(search, "SMALL", small)
        with pytest.raises(Exception, match="no plan fits in memory") as error:
            Planner(graph).plan(machine, workload(machine), Options(model="direct"))
        told.append(str(error.value))
    assert told[0] == told[1]
