"""Every cost model against brute force over the definition, by both solvers, on random DAGs and machines."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit.errors import ChainError, PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import COST_MODELS, price_split
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from fxsplit.planner.search import search
from tests.support.graphs import best_bottleneck, draw_examples, node, profiles, sweep, try_examples, workload


@pytest.fixture(params=["dense", "thresholds"])
def solver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to solve: small lattices by definition, large ones by testing thresholds."""
    monkeypatch.setattr(search, "SMALL", 600 if request.param == "dense" else 0)
    return str(request.param)


@st.composite
def clusters(draw: st.DrawFn, free: bool) -> Machine:
    """1 to 3 devices of any speed, memory and link; in a free order all links are equal, and some devices are hosts."""
    count = draw(st.integers(1, 3))
    devices = tuple(
        Device(
            f"d{i}",
            memory_bytes=draw(st.sampled_from([inf, inf, inf, 1e4, 3e3])),
            speed=draw(st.sampled_from([1.0, 1.0, 0.5, 2.0])),
            bytes_per_s=draw(st.sampled_from([inf, 1e6, 1e5])),
            host=free and draw(st.integers(0, 3)) == 0,
        )
        for i in range(count)
    )
    links, late = st.sampled_from([inf, 1e6, 1e5, 1e4]), st.sampled_from([0.0, 0.5, 4.0])
    rates = (draw(links),) * (count - 1) if free else tuple(draw(links) for _ in range(count - 1))
    latencies = (draw(late),) * (count - 1) if free else tuple(draw(late) for _ in range(count - 1))
    return Machine(devices, rates, latencies_ms=latencies if draw(st.booleans()) else ())


def solve(costs: Costs, machine: Machine, options: Options) -> Plan | None:
    try:
        return Planner(costs).plan(machine, workload(machine), options)
    except PlanError:
        return None


@pytest.mark.parametrize("use_all", [True, False])
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("model", COST_MODELS)
@sweep(15, 120)
def test_equals_brute_force(solver: str, model: str, free: bool, use_all: bool, examples: int) -> None:
    if model == "replicated" and free:
        with pytest.raises(ChainError, match="replicated stages take neighbours"):
            Options(model=model, free=True)
        return

    @try_examples(examples)
    @given(profiles(5), clusters(free), st.booleans())
    def check(costs: Costs, machine: Machine, traffic: bool) -> None:
        # A profile without times on hosts is refused.
        if any(d.host for d in machine.devices) and not any(n.host_ms for n in costs.nodes):
            return
        options = Options(model=model, free=free, use_all=use_all, traffic=traffic)
        best = best_bottleneck(costs, machine, workload(machine), options)
        plan = solve(costs, machine, options)
        if plan is None or best is None:
            assert plan is None and best is None
            return
        assert isclose(plan.bottleneck_ms, best, rel_tol=1e-8, abs_tol=1e-12)
        assert plan.optimal and plan.lower_bound_ms <= best * (1 + 1e-9)
        split = [(s.nodes, s.devices, s.recompute) for s in plan.stages]
        assert price_split(costs, machine, workload(machine), split, options.costs) == plan.stages

    check()


@pytest.mark.parametrize("recompute", ["auto", "always"])
@pytest.mark.parametrize("model", COST_MODELS)
@sweep(15, 120)
def test_recomputation_equals_brute_force(solver: str, model: str, recompute: str, examples: int) -> None:
    @try_examples(examples)
    @given(profiles(5), clusters(False))
    def check(costs: Costs, machine: Machine) -> None:
        options = Options(model=model, recompute=recompute, use_all=False)
        best = best_bottleneck(costs, machine, workload(machine), options)
        plan = solve(costs, machine, options)
        assert (plan is None) == (best is None)
        if plan is not None and best is not None:
            assert isclose(plan.bottleneck_ms, best, rel_tol=1e-8, abs_tol=1e-12)

    check()


def test_only_what_would_not_fit_recomputes() -> None:
    """Stage 0 of two holds two microbatches' activations under 1F1B, and stage 1 one."""
    costs = Costs(
        tuple(node(f"n{i}", [f"n{i - 1}"] if i else [], 1.0, kept_bytes=100) for i in range(4)), (), ("n3",), rows=1
    )
    machine = Machine.planned(2, memory_bytes=200)
    with pytest.raises(PlanError, match="no plan fits in memory"):
        Planner(costs).plan(machine, workload(machine), Options())
    plan = Planner(costs).plan(machine, workload(machine), Options(recompute="auto"))
    assert [(len(s.nodes), s.recompute) for s in plan.stages] == [(2, True), (2, False)]
    assert [s.memory_bytes for s in plan.stages] == [200, 200] and plan.stages[0].backward_ms == 2 * (2 + 1)


def test_the_step_of_an_optimizer_counts_for_stages_that_hand_values_on() -> None:
    """The search knows nothing of it under direct sends, and the price of its plan counted it."""
    two = Costs(tuple(node(f"n{i}", [], 1.0, parameter_bytes=429 * (i == 0)) for i in range(2)), (), ("n0",), rows=1)
    machine = Machine.planned(3, memory_bytes=3000)
    held = {}
    for model in ("direct", "forwarded"):
        options = Options(model=model, use_all=False)
        plan = solve(two, machine, options)
        assert plan is not None and plan.bottleneck_ms == best_bottleneck(two, machine, workload(machine), options)
        held[model] = [stage.memory_bytes for stage in plan.stages]
    # Two versions of the weights fit before another stage under direct sends, and not with a step's own memory.
    assert held == {"direct": [429 * 5, 0], "forwarded": [0, 429 * 4]}


@draw_examples(30, 120, profiles(5), clusters(free=False), st.data())
def test_dear_tensors_do_not_hide_cheap_ones(costs: Costs, machine: Machine, data: st.DataObject) -> None:
    """Prices may differ by more than the digits of a float: a cut still costs its own price."""
    dear = [n.name for n in costs.nodes if data.draw(st.booleans())]
    nodes = tuple(replace(n, output_bytes=n.output_bytes * (1e17 if n.name in dear else 1)) for n in costs.nodes)
    costs = replace(costs, nodes=nodes)
    options = Options(model="direct", use_all=False)
    best, plan = best_bottleneck(costs, machine, workload(machine), options), solve(costs, machine, options)
    assert (plan is None) == (best is None)
    if plan is not None and best is not None:
        assert isclose(plan.bottleneck_ms, best, rel_tol=1e-9, abs_tol=1e-12)


@draw_examples(30, 120, profiles(6), clusters(free=False))
def test_what_may_only_help(costs: Costs, machine: Machine) -> None:
    """Replication may do without replicas, overlap hides transfers, and untaxed traffic is free."""
    base = solve(costs, machine, Options(use_all=False))
    if base is None:
        return
    for better in (Options(model="replicated"), Options(model="overlapped"), Options(traffic=False)):
        other = solve(costs, machine, replace(better, use_all=False))
        assert other is not None and other.bottleneck_ms <= base.bottleneck_ms * (1 + 1e-8)


@draw_examples(30, 120, profiles(6))
def test_direct_plans_do_not_care_for_direction(costs: Costs) -> None:
    """Reversing the graph keeps the optimum: a stage shares the same tensors in both directions."""
    machine = Machine.planned(3, 1e5)
    names = [n.name for n in reversed(costs.nodes)]
    readers: dict[str, list[str]] = {name: [] for name in names}
    for reader in costs.nodes:
        for maker in reader.inputs:
            if maker in readers:
                readers[maker].append(reader.name)
    # The reversed graph exchanges the same tensors: values become tensors without an order of their own.
    from fxsplit.ir.facts.costs.costs import Exchange

    tensors = tuple(Exchange(size, tuple(dict.fromkeys(pins))) for size, pins in costs.tensors)
    silent = {n.name: replace(n, output_bytes=0, gradient_bytes=0) for n in costs.nodes}
    forward = replace(costs, nodes=tuple(silent[n.name] for n in costs.nodes), exchanges=tensors, inputs=costs.inputs)
    backward = replace(
        forward,
        nodes=tuple(replace(silent[name], inputs=tuple(readers[name])) for name in names),
        ordered=tuple((b, a) for a, b in costs.ordered),
    )
    options = Options(model="direct", use_all=False)
    a, b, c = (solve(each, machine, options) for each in (costs, forward, backward))
    assert a is not None and b is not None and c is not None
    assert isclose(a.bottleneck_ms, b.bottleneck_ms, rel_tol=1e-8, abs_tol=1e-12)
    assert isclose(a.bottleneck_ms, c.bottleneck_ms, rel_tol=1e-8, abs_tol=1e-12)
