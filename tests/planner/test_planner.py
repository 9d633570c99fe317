"""The planner against brute force: ideals, lattice, live values, and the best plan, on random DAGs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf, isclose
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fxsplit
from fxsplit.errors import BrokenFact, ChainError, FxsplitError, FxsplitWarning, NoFit, PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.ir.facts.given.pins import Pins
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.blocks import Blocks
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import CostModel, price_split
from fxsplit.ir.manager import run_chain
from fxsplit.passes import Augment, Order, Partition
from fxsplit.planner import Options
from fxsplit.planner.kernels import lattice
from fxsplit.planner.planner import Planner
from fxsplit.planner.problem.moves import list_moves
from fxsplit.planner.problem.problem import pose_problem
from fxsplit.planner.search import search
from fxsplit.planner.search.search import SLACK
from fxsplit.system.kernels import compile_kernel
from tests.support.graphs import (
    best_bottleneck,
    downsets,
    draw_examples,
    ir_of,
    machines,
    node,
    printed_under_two_hash_seeds,
    profiles,
    sweep,
    try_examples,
    workload,
)

PLANNER = (Augment(), Order(), Partition())


def cut_in_two(costs: Costs) -> Machine:
    """Two unlimited devices without a copy between them."""
    return Machine.of(["cpu", "cpu"])


def states_of(costs: Costs) -> tuple[Antichains, States]:
    ir = run_chain(ir_of(costs), [Augment(), Order()])
    return ir[Antichains], ir[States]


def solve(costs: Costs, machine: Machine, **options: object) -> Plan:
    ir = run_chain(ir_of(costs, machine, workload(machine)), [Augment(), Order(), Partition(**options)])  # type: ignore[arg-type]
    return ir[Plan]


@draw_examples(50, 300, profiles())
def test_every_ideal_once_in_a_linear_extension(costs: Costs) -> None:
    chains, _ = states_of(costs)
    found = [frozenset(chains.names(i)) for i in range(len(chains))]
    assert len(set(found)) == len(found)
    assert set(found) == set(downsets(costs))
    for i, j in itertools.combinations(range(len(found)), 2):
        assert not found[j] < found[i], "a subset has the larger number"


@draw_examples(50, 300, profiles())
def test_every_edge_of_the_lattice(costs: Costs) -> None:
    chains, _ = states_of(costs)
    sets = [frozenset(chains.ideal(i)) for i in range(len(chains))]
    pairs = itertools.product(enumerate(sets), repeat=2)
    expected = {(i, v, j) for (i, a), (j, b) in pairs if a < b and len(b - a) == 1 for v in b - a}
    start = np.repeat(np.arange(len(chains)), np.diff(chains.pointer))
    found = list(zip(start.tolist(), chains.node.tolist(), chains.child.tolist(), strict=True))
    assert len(found) == len(set(found)) and set(found) == expected


@draw_examples(50, 300, profiles())
def test_live_values_and_sums_against_the_definition(costs: Costs) -> None:
    chains, states = states_of(costs)
    for i in range(len(chains)):
        inside = set(chains.names(i))
        live = live_gradient = 0.0
        for name, size, gradient, readers, is_output in costs.values:
            if (name in inside or name == "x") and (is_output or not set(readers) <= inside):
                live += size
                live_gradient += gradient
        for exchange in costs.exchanges:
            live_gradient += exchange.output_bytes * (0 < len(inside & set(exchange.nodes)) < len(exchange.nodes))
        assert states.column("live_bytes")[i] == live
        assert states.column("live_gradient_bytes")[i] == live_gradient
        for figure in ("forward_ms", "backward_ms", "parameter_bytes", "kept_bytes"):
            total = sum(getattr(n, figure) for n in costs.nodes if n.name in inside)
            assert isclose(states.column(figure)[i], total, abs_tol=1e-9)


@draw_examples(50, 300, profiles())
def test_the_augmented_antichain_determines_its_ideal(costs: Costs) -> None:
    chains, _ = states_of(costs)
    seen: dict[frozenset[int], int] = {}
    for i in range(len(chains)):
        members = frozenset(chains.antichain(i))
        assert seen.setdefault(members, i) == i
        closure = set(members)
        while more := {p for b in closure for p in chains.blocks.before[b]} - closure:
            closure |= more
        assert closure == set(chains.ideal(i))


@pytest.fixture(params=["dense", "thresholds"])
def solver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to solve: small lattices by definition, large ones by testing thresholds."""
    monkeypatch.setattr(search, "SMALL", 600 if request.param == "dense" else 0)
    return str(request.param)


@sweep(50, 300)
def test_partition_equals_brute_force(solver: str, examples: int) -> None:
    @try_examples(examples)
    @given(profiles(7), machines())
    def check(costs: Costs, machine: Machine) -> None:
        best = best_bottleneck(costs, machine, workload(machine))
        try:
            plan = solve(costs, machine)
        except (PlanError, FxsplitWarning):  # the warning is of stages without a node
            assert best is None
        else:
            assert best is not None
            assert isclose(plan.bottleneck_ms, best, rel_tol=1e-8, abs_tol=1e-12)
            assert plan.optimal and len(plan.stages) == len(machine)

    check()


@draw_examples(20, 60, profiles(7), machines(bounded=False))
def test_thresholds_answer_no_yes_no_yes(costs: Costs, machine: Machine) -> None:
    """Just below the optimum there is no chain, just above there is one; and the bound is below it."""
    best = best_bottleneck(costs, machine, workload(machine))
    if not best:
        return
    chains, states = states_of(costs)
    moves = list_moves(machine, replicated=False, idle="none", free=False, n_stages=None)
    problem = pose_problem(costs, states, chains, machine, workload(machine), CostModel(), moves, {})
    for threshold, possible in ((1 - 1e-6, False), (1 + 1e-6, True), (0.9, False), (1.2, True)):
        path = problem.test(best * threshold)
        assert (path is not None) is possible
        assert path is None or max(problem.loads(path)) <= best * threshold
    assert problem.lower_bound() <= best * (1 + SLACK)


@draw_examples(20, 60, profiles(8), machines(3, bounded=False), st.floats(0.1, 10))
def test_scaling_every_cost_scales_the_optimum(costs: Costs, machine: Machine, factor: float) -> None:
    if len(machine) > len(Blocks.of(costs)):
        return
    times = ("forward_ms", "backward_ms", "forward_launch_ms", "backward_launch_ms")
    scaled = replace(
        costs,
        nodes=tuple(replace(n, **{f: getattr(n, f) * factor for f in times}) for n in costs.nodes),
    )
    unlinked = replace(machine, links=(inf,) * len(machine.links), latencies_ms=())
    a, b = solve(costs, unlinked).bottleneck_ms, solve(scaled, unlinked).bottleneck_ms
    assert isclose(a * factor, b, rel_tol=1e-8, abs_tol=1e-12)


@draw_examples(20, 60, profiles(8), machines(3, bounded=False))
def test_faster_links_and_devices_never_hurt(costs: Costs, machine: Machine) -> None:
    if len(machine) > len(Blocks.of(costs)):
        return
    base = solve(costs, machine).bottleneck_ms
    faster = replace(machine, links=tuple(link * 2 for link in machine.links))
    assert solve(costs, faster).bottleneck_ms <= base * (1 + 1e-8)
    quicker = replace(machine, devices=tuple(replace(d, speed=d.speed * 2) for d in machine.devices))
    assert solve(costs, quicker).bottleneck_ms <= base * (1 + 1e-8)
    assert solve(costs, machine, use_all=False).bottleneck_ms <= base * (1 + 1e-8)


@draw_examples(20, 60, profiles(8), machines(3, bounded=False), st.randoms())
def test_another_order_of_the_nodes_changes_nothing(costs: Costs, machine: Machine, random: Random) -> None:
    if len(machine) > len(Blocks.of(costs)):
        return
    needs = {n.name: set(n.inputs) | {a for a, b in costs.ordered if b == n.name} for n in costs.nodes}
    waiting = {n.name: n for n in costs.nodes}
    order = []
    while waiting:
        chosen = random.choice([name for name in waiting if not needs[name] & set(waiting)])
        order.append(waiting.pop(chosen))
    a, b = solve(costs, machine), solve(replace(costs, nodes=tuple(order)), machine)
    assert isclose(a.bottleneck_ms, b.bottleneck_ms, rel_tol=1e-8, abs_tol=1e-12)


@draw_examples(20, 60, profiles(8))
def test_a_capped_lattice_keeps_an_honest_bound(costs: Costs) -> None:
    """With too many ideals the plan comes from one topological order: never better than the best, bound never above."""
    machine = cut_in_two(costs)
    if len(machine) > len(Blocks.of(costs)):
        return
    exact = solve(costs, machine)
    capped = run_chain(ir_of(costs, machine, workload(machine)), [Augment(max_states=2), Order(), Partition()])[Plan]
    assert capped.bottleneck_ms >= exact.bottleneck_ms * (1 - 1e-8)
    assert capped.lower_bound_ms <= exact.bottleneck_ms * (1 + 1e-8)


def test_kernels_agree_with_their_python() -> None:
    """The compiled enumeration and its source, run by the interpreter, give the same arrays."""
    indegree = np.array([0, 1, 1, 2, 0], np.int32)
    succ_ptr, succ = np.array([0, 2, 3, 4, 4, 4], np.int32), np.array([1, 2, 3, 3], np.int32)
    machine = compile_kernel(lattice.enumerate_ideals)(indegree, succ_ptr, succ, 1000)
    python: Any = lattice.enumerate_ideals(indegree, succ_ptr, succ, 1000)
    for a, b in zip(machine, python, strict=True):
        assert np.array_equal(a, b)
    edges = zip(compile_kernel(lattice.lattice_edges)(*machine[:2]), lattice.lattice_edges(*python[:2]), strict=True)
    assert all(np.array_equal(a, b) for a, b in edges)


def test_memory_lists_grow() -> None:
    """Many incomparable starts: no point of a long Pareto list may be lost."""
    wide = [node(f"n{i}", ["x"], 1.0 + i, parameter_bytes=2 ** (10 - i)) for i in range(10)]
    costs = Costs(tuple(wide), (), (wide[-1].name,), rows=1)
    costs = replace(costs, nodes=tuple(replace(n, inputs=()) for n in wide))
    machine = Machine(tuple(Device(f"d{i}", torch.device("cpu"), m) for i, m in enumerate((7500.0, 3750.0))), (inf,))
    best = best_bottleneck(costs, machine, workload(machine))
    assert best is not None and isclose(solve(costs, machine).bottleneck_ms, best)


def test_traffic_moves_the_cut() -> None:
    """The balanced cut crosses a large value; with a slow link the cheap one wins."""
    sizes = [10, 10_000, 10, 10]
    chain = [
        node(f"n{i}", [f"n{i - 1}"] if i else ["x"], 1.0, output_bytes=s, gradient_bytes=s) for i, s in enumerate(sizes)
    ]
    costs = Costs(tuple(chain), (), ("n3",), rows=1)
    costs = replace(costs, nodes=(replace(chain[0], inputs=()), *chain[1:]))
    fast, slow = (Machine.of(["cpu", "cpu"], bytes_per_s=b) for b in (inf, 1e6))
    assert [len(s.nodes) for s in solve(costs, fast).stages] == [2, 2]
    plan = solve(costs, slow)
    assert sorted(len(s.nodes) for s in plan.stages) == [1, 3]
    assert plan.stages[0].send_ms == plan.stages[1].receive_ms == pytest.approx(0.02)


def test_memory_moves_the_cut_and_counts_what_is_in_flight() -> None:
    chain = [node(f"n{i}", [f"n{i - 1}"] if i else [], 1.0, kept_bytes=100) for i in range(4)]
    costs = Costs(tuple(chain), (), ("n3",), rows=1)
    tight = Machine((Device("a", torch.device("cpu"), 200.0), Device("b", torch.device("cpu"), 1e9)), (inf,))
    assert [len(s.nodes) for s in solve(costs, tight).stages] == [1, 3]  # stage 0 holds two microbatches under 1F1B


def test_pins_bind_and_contradictions_are_named() -> None:
    chain = [node(f"n{i}", [f"n{i - 1}"] if i else [], 1.0) for i in range(4)]
    costs = Costs(tuple(chain), (), ("n3",), rows=1)
    machine = cut_in_two(costs)
    start = ir_of(costs, machine, workload(machine))
    plan = run_chain(start.learn(Pins({"n2": 0})), PLANNER)[Plan]
    assert [len(s.nodes) for s in plan.stages] == [3, 1]
    with pytest.raises(PlanError, match="no plan for 2 devices satisfies the pins"):
        run_chain(start.learn(Pins({"n0": 1, "n2": 0})), PLANNER)
    with pytest.raises(PlanError, match="'n0' is pinned to device 5, and there are devices 0 to 1"):
        run_chain(start.learn(Pins({"n0": 5})), PLANNER)
    # The name is the user's, and not that of the submodule's first node.
    blocks = replace(costs, nodes=tuple(replace(n, module="block") for n in costs.nodes))
    with pytest.raises(PlanError, match="'block' is pinned to device 2, and there are devices 0 to 1"):
        Planner(blocks, {"block": 2}).plan(machine, workload(machine), Options())
    with pytest.raises(PlanError, match="cannot pin 'nothing'"):
        run_chain(start.learn(Pins({"nothing": 0})), PLANNER)


def test_too_little_memory_says_how_much_and_where() -> None:
    chain = [node(f"n{i}", [f"n{i - 1}"] if i else [], 1.0, parameter_bytes=1000) for i in range(4)]
    costs = Costs(tuple(chain), (), ("n3",), rows=1)
    machine = Machine.of(["cpu", "cpu"], memory_bytes=7000)
    with pytest.raises(
        PlanError, match=r"stage \d of 2 on cpu:\d \(n\d .. n\d\) short by 1000 B \(1000 bytes\).*7\.8 KiB of 6\.8 KiB"
    ):
        solve(costs, machine)


def test_more_devices_than_nodes() -> None:
    costs = Costs((node("a"), node("b", ["a"])), (), ("b",), rows=1)
    with pytest.raises(PlanError, match="a plan of 3 stages, and the graph has only 2 nodes"):
        fxsplit.plan(costs, Machine.of(["cpu"] * 3))
    with pytest.warns(FxsplitWarning, match="some stages only pass values on"):
        assert solve(costs, Machine.of(["cpu"] * 3)).bottleneck_ms == fxsplit.plan(costs, 2).bottleneck_ms


def test_a_wrong_plan_is_caught() -> None:
    """Plan.verify computes from the definition: a plan that lies, or runs backwards, does not pass."""
    chain = [node(f"n{i}", [f"n{i - 1}"] if i else [], 1.0) for i in range(4)]
    costs = Costs(tuple(chain), (), ("n3",), rows=1)
    machine = cut_in_two(costs)
    ir = ir_of(costs, machine, workload(machine))
    plan = run_chain(ir, PLANNER)[Plan]
    flattering = replace(plan, stages=(replace(plan.stages[0], forward_ms=0.5), plan.stages[1]))
    backwards = replace(
        plan,
        stages=price_split(
            costs, machine, workload(machine), [(("n2", "n3"), (0,), False), (("n0", "n1"), (1,), False)], CostModel()
        ),
    )
    forgetful = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], nodes=("n2",))))
    for wrong in (flattering, backwards, forgetful, replace(plan, lower_bound_ms=99.0)):
        with pytest.raises(BrokenFact):
            wrong.verify(ir)


PROGRAM = """
from tests.support.graphs import *
from fxsplit.ir.manager import run_chain
from fxsplit.passes import Augment, Order, Partition
from fxsplit.ir.facts.plan import Plan
nodes = [node("a"), node("b", ["a"]), node("c", ["a"]), node("d", ["a"]), node("e", ["b", "c", "d"])]
costs = Costs(tuple(nodes), (), ("e",), rows=1)
machine = Machine.of(["cpu"] * 3)
print(run_chain(ir_of(costs, machine, workload(machine)), [Augment(), Order(), Partition()])[Plan])
"""


@pytest.mark.long
def test_plans_do_not_depend_on_the_hash_seed() -> None:
    """Ties are broken the same way whatever the order of sets."""
    printed = printed_under_two_hash_seeds(PROGRAM)
    assert len(printed) == 1 and "stage" in printed.pop()


def test_errors_are_fxsplits() -> None:
    assert issubclass(PlanError, FxsplitError)


def costs(*nodes: object, outputs: tuple[str, ...]) -> Costs:
    return Costs(nodes, (), outputs, rows=1)  # type: ignore[arg-type]


def test_pins_name_devices_in_a_free_order_too() -> None:
    """Once a device with a pin could be exchanged for another device of its kind."""
    two = costs(node("a"), node("b", ("a",)), outputs=("b",))
    machine = Machine.planned(2)
    plan = Planner(two, pins={"a": 1, "b": 0}).plan(machine, workload(machine), Options(free=True))
    assert [s.devices for s in plan.stages] == [(1,), (0,)]


def test_pins_may_name_two_devices_of_one_replicated_stage() -> None:
    """Once such pins were called a contradiction."""
    two = costs(node("a"), node("b", ("a",)), outputs=("b",))
    machine = Machine.planned(2)
    planner = Planner(two, pins={"a": 0, "b": 1}, together=[["a", "b"]])
    plan = planner.plan(machine, workload(machine), Options(model="replicated"))
    assert [s.devices for s in plan.stages] == [(0, 1)]
    with pytest.raises(Exception, match="pin both to one device"):
        planner.plan(machine, workload(machine), Options(use_all=False))


def chain_of(count: int) -> Costs:
    """A chain of nodes, each 1 ms forward and 2 ms backward."""
    nodes = [node(f"n{i}", [f"n{i - 1}"] if i else [], 1.0) for i in range(count)]
    return Costs(tuple(nodes), (), (f"n{count - 1}",), rows=1)


def test_a_schedule_with_several_stages_a_device_has_all_of_them() -> None:
    """With idle devices allowed, the plan had one stage, which no schedule runs, and was called optimal."""
    found = fxsplit.plan(chain_of(8), 2, schedule="Interleaved1F1B", options=Options(use_all=False, model="forwarded"))
    assert len(found.stages) == 4
    with pytest.raises(PlanError, match=r"Interleaved1F1B needs all of its stages, so use fewer than 3 devices"):
        fxsplit.plan(chain_of(4), 3, schedule="Interleaved1F1B", options=Options(use_all=False))


def test_the_fastest_real_device_is_compared_with() -> None:
    """Under Chimera each stage is on a slow and a fast device, and both counted as slow."""
    machine = Machine((fxsplit.Device("a", speed=1.0), fxsplit.Device("b", speed=10.0)), (inf,))
    found = fxsplit.plan(chain_of(4), machine, schedule="Chimera")
    assert found.single_ms == pytest.approx(1.2) and found.speedup == pytest.approx(1.2 / found.steady_ms)


def test_a_host_without_times_is_refused() -> None:
    """All its nodes took 0 ms, and the plan was called optimal."""
    machine = Machine((fxsplit.Device("cpu", host=True), fxsplit.Device("b")), (inf,))
    with pytest.raises(PlanError, match=r"device 'cpu' is a host, and the profile has no times on hosts"):
        fxsplit.plan(chain_of(4), machine)


def test_options_of_another_type_are_named() -> None:
    wrong: Any = "5"
    for option, said in (("time_limit", "a number"), ("optimizer_factor", "a number"), ("use_all", "True or False")):
        with pytest.raises(ChainError, match=rf"partition\{{{option}='5'\}}: give {said}"):
            Options(**{option: wrong})
    with pytest.raises(PlanError, match=r"together has 'n0': give sets of names"):
        fxsplit.plan(chain_of(4), 2, together=["n0"])


@pytest.mark.parametrize(("stated", "advice"), [("plan", "partition{recompute=auto}"), ("never", "compile(recompute=")])
def test_advice_that_helps(stated: str, advice: str) -> None:
    """The pass may not choose what compile(recompute="never") has ruled out, and was advised all the same."""
    heavy = Costs(
        tuple(node(f"n{i}", [f"n{i - 1}"] if i else [], 1.0, kept_bytes=1e6) for i in range(4)), (), ("n3",), rows=1
    )
    machine = Machine.planned(2, memory_bytes=1e5)
    with pytest.raises(NoFit) as raised:
        Planner(heavy).plan(machine, replace(workload(machine), recompute=stated), Options())
    assert f"stages that recompute ({advice}" in str(raised.value)
