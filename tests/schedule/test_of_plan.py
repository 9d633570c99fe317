"""Schedules, times and memory of hand-made plans, by the definitions of their cost models."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from fxsplit.errors import ScheduleError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import CostModel, StagePlan
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from fxsplit.schedule import generate, simulate
from fxsplit.schedule.generators.catalogue import Scheduler
from fxsplit.schedule.of_plan import build_schedule, find_replicas, name_places, read_footprints, read_times
from fxsplit.schedule.simulation.memory import Footprint
from tests.support.graphs import node, workload

NOTHING = dict.fromkeys(("receive_ms", "send_ms", "reduce_ms", "load_ms", "in_bytes", "out_bytes", "memory_bytes"), 0.0)


def stage(*devices: int, **figures: Any) -> StagePlan:
    """A stage of 10 ms forward and 20 ms backward, 8 of them for weights."""
    times = {"forward_ms": 10.0, "backward_ms": 20.0, "weight_ms": 8.0}
    return StagePlan(nodes=(), devices=devices, **{**NOTHING, **times, **figures})


def plan(*stages: StagePlan, model: str = "forwarded") -> Plan:
    names = tuple(f"d{d}" for d in range(1 + max(d for s in stages for d in s.devices)))
    return Plan(stages, names, 0.0, 0.0, "1F1B", 4, 1, 1, CostModel(model))


# Over the cut 3 bytes go forward and 1 back, so three quarters of its 4 ms are the value's.
CUT = plan(
    stage(0, send_ms=4.0, out_bytes=3.0, out_gradient_bytes=1.0),
    stage(1, receive_ms=4.0, send_ms=2.0, in_bytes=3.0, in_gradient_bytes=1.0),
)


def test_transfers_keep_both_ends_busy() -> None:
    """The last stage's 2 ms are of outputs that nobody counted in bytes, and are halved."""
    times = read_times(CUT, generate("1F1B", 2, 4))
    assert times.forward_ms == [13.0, 14.0] and times.backward_ms == [21.0, 22.0] and times.weight_ms == [8.0, 8.0]
    assert times.forward_hop_ms == [0.0, 0.0] and times.backward_hop_ms == [0.0, 0.0]


def test_overlapped_transfers_are_under_way() -> None:
    times = read_times(plan(*CUT.stages, model="overlapped"), generate("1F1B", 2, 4))
    assert times.forward_ms == [10.0, 10.0] and times.backward_ms == [20.0, 20.0]
    assert times.forward_hop_ms == [0.0, 3.0] and times.backward_hop_ms == [0.0, 1.0]


def test_latencies_are_part_of_transfers_that_keep_devices_busy() -> None:
    """Of 10 ms, 2 x 3 are the latencies of a value and a gradient, and three quarters of the rest are the value's."""
    late = replace(CUT.stages[0], send_ms=10.0), replace(CUT.stages[1], receive_ms=10.0, in_latency_ms=3.0)
    times = read_times(plan(*late), generate("1F1B", 2, 4))
    assert times.forward_ms == [16.0, 17.0] and times.backward_ms == [24.0, 25.0]
    assert times.latency_ms == () and times.transfers == "asynchronous"
    # Without a gradient, all of the latency is the value's.
    alone = replace(late[0], out_gradient_bytes=0.0), replace(late[1], in_gradient_bytes=0.0)
    assert read_times(plan(*alone), generate("1F1B", 2, 4)).forward_ms == [20.0, 21.0]


def test_latencies_of_overlapped_and_blocking_transfers_are_on_the_links() -> None:
    """The transfers of a blocking plan contain the latencies of both messages; those of an overlapped one do not."""
    hand_over = replace(CUT.stages[0], send_ms=10.0), replace(CUT.stages[1], receive_ms=10.0, in_latency_ms=3.0)
    blocking = read_times(replace(plan(*hand_over), transfers="blocking"), generate("1F1B", 2, 4))
    assert blocking.forward_ms == [10.0, 10.0] and blocking.latency_ms == [0.0, 3.0]
    assert blocking.forward_hop_ms == [0.0, 3.0] and blocking.backward_hop_ms == [0.0, 1.0]
    assert blocking.transfers == "blocking"
    overlapped = CUT.stages[0], replace(CUT.stages[1], in_latency_ms=3.0)
    times = read_times(plan(*overlapped, model="overlapped"), generate("1F1B", 2, 4))
    assert times.forward_hop_ms == [0.0, 3.0] and times.latency_ms == [0.0, 3.0] and times.transfers == "asynchronous"


def test_a_blocking_stage_is_as_busy_as_its_load() -> None:
    """In the middle of a long batch, the second stage takes its load for each microbatch: it computes and exchanges."""
    nodes = tuple(
        replace(node(f"n{i}", [f"n{i - 1}"] if i else [], output_bytes=2, gradient_bytes=1), backward_ms=2.0)
        for i in range(2)
    )
    costs = Costs(nodes, (), ("n1",), rows=1)
    machine = Machine((Device("a"), Device("b")), (1e4,), latencies_ms=(0.5,), transfers="blocking")
    made = Planner(costs).plan(machine, workload(machine), Options())
    assert made.transfers == "blocking" and [s.load_ms for s in made.stages] == [3.0 + 0.3 + 1.0] * 2
    steps = []
    for count in (20, 21):
        schedule = generate("GPipe", 2, count)
        steps.append(simulate(schedule, read_times(made, schedule)).step_ms)
    assert steps[1] - steps[0] == pytest.approx(made.bottleneck_ms)


def test_a_transfer_is_over_when_its_slower_end_is() -> None:
    """If only the sender's own link was slow, the transfer took no time."""
    slow = replace(CUT.stages[0], send_ms=8.0), CUT.stages[1]
    times = read_times(plan(*slow, model="overlapped"), generate("1F1B", 2, 4))
    assert times.forward_hop_ms == [0.0, 6.0] and times.backward_hop_ms == [0.0, 2.0]


def test_a_replica_takes_as_many_times_as_long() -> None:
    """Sums count once; in a schedule without sums, each backward pays for them."""
    wide = plan(stage(0), stage(1, 2, 3, reduce_ms=5.0, receive_ms=2.0, forward_launch_ms=1.0, backward_launch_ms=2.0))
    schedule = build_schedule(wide, Scheduler("1F1B", 2), 6)
    assert schedule.homes == ((0,), (1, 2, 3)) and find_replicas(wide) == schedule.homes
    times = read_times(wide, schedule)
    assert times.forward_ms == [10.0, 33.0] and times.backward_ms == [20.0, 63.0]
    assert times.weight_ms == [8.0, 24.0] and times.reduce_ms == [0.0, 15.0]
    assert times.forward_launch_ms == [0.0, 3.0] and times.backward_launch_ms == [0.0, 6.0]
    plain = read_times(wide, generate("1F1B", 2, 6))
    assert plain.backward_ms == [20.0, 26.0] and plain.forward_ms == [10.0, 11.0]


def test_a_plan_with_a_device_a_stage_has_no_replicas() -> None:
    assert find_replicas(CUT) is None
    assert build_schedule(CUT, Scheduler("GPipe", 2), 3) == generate("GPipe", 2, 3)
    with pytest.raises(ScheduleError, match="has 3 stages, and the plan 2: plan for 3 devices"):
        read_times(CUT, generate("1F1B", 3, 4))


@pytest.mark.parametrize(
    ("memory_bytes", "recompute", "most"),
    [
        ((), False, 4),  # 4 devices from stage 0 on keep all busy
        ((100.0,) * 4, False, 4),
        ((39.0,) * 4, False, 2),  # 10 held, and 12 for each microbatch
        ((46.0,) * 4, False, 3),
        ((33.9,) * 4, False, 1),
        ((1.0,) * 4, False, 1),  # too little for any: whether the plan fits was the planner's question
        ((30.0,) * 4, True, 4),  # 10 held, 10 of the one that runs, and 2 for each
        ((25.9,) * 4, True, 2),
    ],
)
def test_replicas_hold_what_fits(memory_bytes: tuple[float, ...], recompute: bool, most: int) -> None:
    in_hand = {"forward_bytes": 12.0, "whole_bytes": 12.0}
    first = stage(0, held_bytes=10.0, resting_bytes=2.0 if recompute else 12.0, recompute=recompute, **in_hand)
    schedule = build_schedule(plan(first, stage(1, 2, 3)), Scheduler("1F1B", 4), 12, memory_bytes)
    assert schedule.peak_in_flight()[0] == most


def test_the_smallest_device_of_a_stage_decides() -> None:
    wide = stage(0, 1, held_bytes=10.0, resting_bytes=10.0, whole_bytes=10.0)
    schedule = build_schedule(plan(wide, stage(2)), Scheduler("1F1B", 3), 8, (100.0, 20.0, 100.0))
    assert schedule.peak_in_flight()[0] == 1


def test_replicas_have_one_stage_a_device() -> None:
    wide = plan(stage(0, 1), stage(2))
    assert build_schedule(wide, Scheduler("1F1B", 3, stages_per_device=1), 4).n_devices == 3
    with pytest.raises(ScheduleError, match="a plan with replicated stages has one stage a device"):
        build_schedule(wide, Scheduler("1F1B", 3, stages_per_device=2), 4)


def test_footprints() -> None:
    figures = {name: float(i) for i, name in enumerate(f.name for f in fields(Footprint) if f.name != "whole_bytes")}
    (found,) = read_footprints(plan(stage(0, whole_bytes=99.0, **figures)))
    assert asdict(found) == figures | {"whole_bytes": 99.0}


@pytest.mark.parametrize("name", ["LoopedBFS", "Interleaved1F1B", "ZBVZeroBubble", "Chimera", "PipeDream"])
def test_a_schedule_without_replicas_says_so(name: str) -> None:
    """With several stages a device the memory of a non-existent device was read: an IndexError."""
    wide = plan(stage(0), stage(1, 2, 3))
    with pytest.raises(ScheduleError, match=f"{name}: the plan gives a stage several devices"):
        build_schedule(wide, Scheduler(name, 2), 4, [1e9, 1e9])


def test_each_device_is_named_by_its_parts_of_the_model() -> None:
    parts = [replace(stage(i), nodes=("x", "y"), begins_at=f"layers.{i}", ends_at=f"layers.{i}.mlp") for i in range(4)]
    two = plan(*parts)
    assert name_places(two, generate("Interleaved1F1B", 2, 2, 2)) == (
        "layers.0 .. layers.0.mlp, layers.2 .. layers.2.mlp",
        "layers.1 .. layers.1.mlp, layers.3 .. layers.3.mlp",
    )
    assert stage(0).place == "(passes values on)" and replace(parts[0], ends_at="layers.0").place == "layers.0"
