"""Each fact of planning checks itself: broken in one place, its verify says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
import torch

from fxsplit.api.plan import lay_out
from fxsplit.errors import BrokenFact
from fxsplit.ir.facts.costs.costs import Costs, Exchange
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.blocks import Blocks, build_csr
from fxsplit.ir.facts.lattice.states import SUMMED, States
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import CostModel, price_split
from fxsplit.ir.graph import IR
from fxsplit.ir.manager import run_chain
from fxsplit.passes import Augment, Order, Partition
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from fxsplit.schedule import simulate
from fxsplit.schedule.generators.catalogue import Scheduler
from fxsplit.schedule.of_plan import build_schedule, read_times
from fxsplit.system.figures import format_bytes
from tests.cli.test_plan import chain
from tests.planner.lattice.test_lattice import DIAMOND
from tests.support.graphs import ir_of, node, one_each

MACHINE = Machine.planned(2, 1e3)
LOAD = Workload("1F1B", 4, {1: (1,), 2: (2, 1)})


@pytest.fixture(scope="module")
def ir() -> IR:
    return run_chain(ir_of(DIAMOND, MACHINE, LOAD), [Augment(), Order(), Partition()])


def change(array: np.ndarray[Any, Any], place: Any, value: float) -> np.ndarray[Any, Any]:
    copy = array.copy()
    copy[place] = value
    return copy


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda a: replace(a, blocks=replace(a.blocks, members=(("a",), ("b",), ("c",), ("e",)))), "other nodes"),
        (lambda a: replace(a, parent=a.parent[:-1], last=a.last[:-1]), "the last ideal has 3 of 4 blocks"),
        (lambda a: replace(a, child=change(a.child, 0, 5)), "one block larger"),
        (lambda a: replace(a, pointer=change(a.pointer, 1, 0)), "one block larger|no larger neighbour"),
    ],
)
def test_a_broken_lattice(ir: IR, wrong: Callable[[Antichains], Antichains], message: str) -> None:
    ir[Antichains].verify(ir)
    with pytest.raises(BrokenFact, match=message):
        wrong(ir[Antichains]).verify(ir)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda s: replace(s, features=s.features[:-1]), "5 states for 6 antichains"),
        # A sum that is no number passed, and the search then blamed pins that nobody had set.
        (lambda s: replace(s, features=change(s.features, (2, 0), np.nan)), "sums to less"),
        (lambda s: replace(s, in_from=change(s.in_from, 0, 3)), "before a subset"),
        (lambda s: replace(s, features=change(s.features, (3, 0), 0.5)), "sums to less"),
    ],
)
def test_a_broken_state_sequence(ir: IR, wrong: Callable[[States], States], message: str) -> None:
    ir[States].verify(ir)
    with pytest.raises(BrokenFact, match=message):
        wrong(ir[States]).verify(ir)
    assert "live_bytes" not in SUMMED, "live bytes go up and down, and are not verified to grow"


def test_facts_print_their_section(ir: IR) -> None:
    assert str(ir[Antichains]).startswith("6 states of 4 blocks: every ideal\n     0 live")
    assert str(ir[States]).count("\n") == 6
    assert str(LOAD) == "1F1B, 4 microbatches, in flight: 1 stages [1]; 2 stages [2, 1]"
    stepping = replace(LOAD, versions={2: (2, 1)})
    assert str(stepping).endswith("weight versions of 2 stages [2, 1]")
    assert stepping.versions_of(2) == (2, 1) and LOAD.versions_of(2) == (1, 1)


def test_blocks_are_convex_and_ordered_by_chains() -> None:
    """Sharing between b and d pulls c in, which lies between them; a second branch waits for the first."""
    nodes = [node("a"), node("b", ["a"]), node("e", ["a"]), node("c", ["b"]), node("d", ["c"]), node("f", ["d", "e"])]
    costs = Costs(tuple(nodes), (), ("f",), together=(("b", "d"),), ordered=(("d", "e"),), rows=1)
    blocks = Blocks.of(costs)
    assert blocks.members == (("a",), ("b", "c", "d"), ("e",), ("f",))
    assert blocks.before == ((), (0,), (0, 1), (1, 2)) and blocks.after == ((1, 2), (2, 3), (3,), ())
    whole = blocks.joined([[0, 1], [2], [3]], costs)
    assert whole.members == (("a", "b", "c", "d"), ("e",), ("f",)) and whole.home["c"] == 0
    turned = blocks.reordered([1, 0, 2, 3])
    assert turned.members[0] == ("b", "c", "d") and turned.before == ((1,), (), (0, 1), (0, 2))
    assert [part.tolist() for part in build_csr([[3], [], [1, 2]])] == [[0, 1, 1, 3], [3, 1, 2]]


def test_a_split_is_priced_by_hand() -> None:
    """Cut after {a, b} at 1 byte per ms: a (1 and 100 back) and b (2) cross, and the output d (8) does not."""
    costs = replace(DIAMOND, exchanges=(Exchange(32.0, ("a", "d")),))
    first, second = price_split(costs, MACHINE, LOAD, one_each([("a", "b"), ("c", "d")]), CostModel())
    assert (first.forward_ms, first.backward_ms, first.weight_ms) == (2.0, 4.0, 2.0)
    assert (first.receive_ms, first.send_ms, second.receive_ms, second.send_ms) == (0.0, 135.0, 135.0, 0.0)
    assert (first.in_bytes, first.out_bytes, first.out_gradient_bytes) == (16.0, 3.0, 132.0)
    assert (second.out_bytes, second.memory_bytes, first.memory_bytes) == (8.0, 3.0 + 8.0, 2 * (16.0 + 3.0))
    assert first.load_ms == 6.0 + 135.0
    overlapped, _ = price_split(costs, MACHINE, LOAD, one_each([("a", "b"), ("c", "d")]), CostModel("overlapped"))
    assert overlapped.load_ms == 135.0
    free, _ = price_split(costs, MACHINE, LOAD, one_each([("a", "b"), ("c", "d")]), CostModel(traffic=False))
    assert free.load_ms == 6.0
    direct, reader = price_split(costs, MACHINE, LOAD, one_each([("a", "b"), ("c", "d")]), CostModel("direct"))
    assert (direct.send_ms, direct.receive_ms, reader.receive_ms, direct.memory_bytes) == (135.0, 0.0, 135.0, 0.0)


def test_replicas_and_recomputing_by_hand() -> None:
    costs = Costs((node("a", parameter_bytes=8, kept_bytes=10, buffer_bytes=1),), (), ("a",), rows=1)
    (stage,) = price_split(costs, MACHINE, LOAD, [(("a",), (0, 1), True)], CostModel(optimizer_factor=1.0))
    assert (stage.forward_ms, stage.backward_ms) == (0.5, 1.5), "two devices; the forward runs twice"
    assert stage.reduce_ms == 8 * 4 * 1 / (4 * 1.0) and stage.memory_bytes == 8 * 3 + 1 + 10
    assert stage.held_bytes == 25 and stage.kept_bytes == 10 and stage.parameter_bytes == 8


def test_launches_are_priced_by_hand() -> None:
    """Two nodes of 3 ms are launched within 5 and 3 ms: on a device twice as fast that takes as long."""
    nodes = node("a", forward_launch_ms=1, backward_launch_ms=4), node("b", ["a"], forward_launch_ms=3)
    costs = Costs(nodes, (), ("b",), rows=1)
    assert (costs.compute_ms, costs.launch_ms, costs.total_ms) == (6.0, 8.0, 8.0)
    machine = Machine((Device("a", speed=2.0), Device("b", speed=2.0), Device("h", host=True)), (1e3, 1e3))
    load = Workload("1F1B", 4, {1: (1,), 2: (2, 1)})
    first, second = price_split(costs, machine, load, one_each([("a",), ("b",)]), CostModel())
    assert (first.forward_launch_ms, first.backward_launch_ms, first.load_ms) == (1.0, 4.0, 5.0)
    assert (second.forward_launch_ms, second.backward_launch_ms, second.load_ms) == (3.0, 0.0, 3.0)
    (both,) = price_split(costs, machine, load, [(("a", "b"), (0, 1), True)], CostModel())
    assert (both.forward_launch_ms, both.backward_launch_ms, both.load_ms) == (2.0, 4.0, 6.0), "half of 4, and of 4 + 4"
    (host,) = price_split(costs, machine, load, [(("a", "b"), (2,), False)], CostModel())
    assert host.launch_ms == host.load_ms == 0.0


def test_a_table_has_launches_where_there_are_some(ir: IR) -> None:
    assert "launch ms" not in str(ir[Plan]) and "launch ms" not in str(ir[Costs])
    launched = tuple(replace(s, forward_launch_ms=1.5, backward_launch_ms=2.0) for s in ir[Plan].stages)
    head, first, *_ = str(replace(ir[Plan], stages=launched)).splitlines()
    assert head.split()[8:10] == ["launch", "ms"] and first.split()[5] == "3.500"
    nodes = tuple(replace(n, backward_launch_ms=0.25) for n in ir[Costs].nodes)
    costs = replace(ir[Costs], nodes=nodes, environment={"device": "H100", "clock": "1 GHz"})
    head, first, *rest = str(costs).splitlines()
    assert head.split()[5:7] == ["launch", "ms"] and first.split()[3] == "0.250"
    assert rest[-1] == "measured on: H100, 1 GHz"
    plan = Plan.assemble(ir[Plan].stages, costs, MACHINE, LOAD, CostModel(), lower_bound_ms=0.0, n_states=1)
    assert plan.measured_on == "H100, 1 GHz" and str(plan).endswith("\nmeasured on: H100, 1 GHz")
    assert "measured on" not in str(ir[Plan])


@pytest.mark.parametrize(
    ("names", "shared"),
    [
        (("cuda:0", "cuda:0"), 1.0),
        (("cuda:0", "cuda:1"), 0.0),
        (("cpu", "cpu"), 0.0),
        ((None, None), 0.0),
    ],
)
def test_a_plan_tells_what_stages_that_share_a_gpu_take_at_least(
    ir: IR, names: tuple[str | None, str | None], shared: float
) -> None:
    """Such stages used to be planned as on GPUs of their own, with a speed-up that is out of reach."""
    devices = [None if name is None else torch.device(name) for name in names]
    given = [replace(d, torch_device=device) for d, device in zip(MACHINE.devices, devices, strict=True)]
    machine = replace(MACHINE, devices=tuple(given))
    plan = Plan.assemble(ir[Plan].stages, ir[Costs], machine, LOAD, CostModel(), lower_bound_ms=0.0, n_states=1)
    work = sum(stage.forward_ms + stage.backward_ms for stage in plan.stages)
    assert len(plan.stages) == 2 and plan.shared_ms == shared * work
    least = f"a step takes {LOAD.n_microbatches * work:.3f} ms at least"
    assert (least in str(plan)) == bool(shared)
    told = plan.single_ms / (max(work, plan.bottleneck_ms) if shared else plan.bottleneck_ms)
    assert f"steady-state speed-up {told:.2f} over" in str(plan)


EVEN = chain([1] * 8)


def find_speedup(devices: tuple[Device, ...], schedule: str, model: str = "forwarded") -> float:
    """Return the speed-up of a plan of eight equal nodes."""
    machine = Machine(devices, (inf,) * (len(devices) - 1))
    return Planner(EVEN).plan(*lay_out(machine, schedule, 8), Options(model=model)).speedup


@pytest.mark.parametrize("speed", [1.0, 10.0, 0.25])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "Chimera", "PipeDream-2BW"])
def test_a_speedup_counts_devices_and_not_stages_and_compares_with_a_device_of_the_machine(
    schedule: str, speed: float
) -> None:
    """Two devices of any one speed are at most twice as fast as one of them, whatever stages they have."""
    assert find_speedup(tuple(Device(f"d{i}", speed=speed) for i in range(2)), schedule) == pytest.approx(2.0)


def test_a_speedup_compares_with_the_fastest_device() -> None:
    fast, slow = Device("fast", speed=3.0), Device("slow", speed=1.0)
    # Of 24 ms, the fast device takes 6 nodes and the slow one 2, so 6 ms each. The fast device by itself takes 8 ms.
    assert find_speedup((fast, slow), "1F1B") == pytest.approx(8 / 6)
    # Replicas of one stage wait for the slower of them, so that a stage for each is faster.
    assert find_speedup((fast, slow), "1F1B", "replicated") == pytest.approx(8 / 6)
    assert find_speedup((slow, replace(slow, name="other")), "1F1B", "replicated") == pytest.approx(2.0)


def test_a_speedup_is_what_the_busiest_device_allows_in_the_simulated_steady_state() -> None:
    """With ever more microbatches the simulated step comes to `steady_ms` for each of them."""
    for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "Chimera"):
        machine, workload = lay_out(Machine.planned(2), schedule, 256)
        plan = Planner(EVEN).plan(machine, workload, Options())
        made = build_schedule(plan, Scheduler(schedule, 2), 256)
        step_ms = simulate(made, read_times(plan, made)).step_ms
        assert plan.steady_ms <= step_ms / 256 <= 1.02 * plan.steady_ms, schedule


def test_a_plan_whose_speedup_is_not_that_of_its_costs_is_broken(ir: IR) -> None:
    plan = ir[Plan]
    assert plan.speedup == plan.single_ms / plan.steady_ms
    for figure in ("single_ms", "busiest_ms"):
        with pytest.raises(BrokenFact, match=f"the plan is said to have {figure}="):
            replace(plan, **{figure: 2 * getattr(plan, figure)}).verify(ir)


def test_a_plan_tells_its_gap(ir: IR) -> None:
    plan = ir[Plan]
    assert plan.optimal and plan.gap == 0.0
    assert replace(plan, lower_bound_ms=plan.bottleneck_ms / 2).gap == 1.0
    assert replace(plan, lower_bound_ms=0.0).gap == float("inf")
    with pytest.raises(BrokenFact, match="lower bound"):
        replace(plan, lower_bound_ms=plan.bottleneck_ms + 1).verify(ir)
    first, *others = plan.stages
    with pytest.raises(BrokenFact, match="do not partition"):
        replace(plan, stages=(replace(first, nodes=first.nodes[1:]), *others)).verify(ir)


def test_bytes_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, -1536, 1024**2, 3 * 1024**4)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "-1.5 KiB",
        "1.0 MiB",
        "3072.0 GiB",
    ]
