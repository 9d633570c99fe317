"""The synchronous schedules: pure functions of devices, microbatches and stages a device.

In a synchronous schedule the optimizer steps after the whole batch, so the gradients equal the unsplit model's.
Drawings in docstrings have one line for each device, and time runs to the right; see `action.py` for the words.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxsplit.errors import ScheduleError
from fxsplit.schedule.action import BACKWARD, FORWARD, INPUT_GRADIENT, REDUCE, WEIGHT_GRADIENT, Action
from fxsplit.schedule.generators.greedy import Rows, list_schedule
from fxsplit.schedule.homes import cross_both_ways, deal_in_turn, line
from fxsplit.schedule.schedule import Homes, Schedule


def gpipe(n_devices: int, n_microbatches: int, stages_per_device: int = 1) -> Schedule:
    """Return GPipe (Huang et al. 2019): all forwards, then all backwards.

        device 0: F0 F1 F2 F3                   B0--- B1--- B2--- B3---
        device 1:    F0 F1 F2 F3          B0--- B1--- B2--- B3---
        device 2:       F0 F1 F2 F3 B0--- B1--- B2--- B3---

    As actions, on 2 devices with 4 microbatches:

        0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
        1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3

    It is the simplest schedule, and holds the activations of all microbatches at once. Raises ScheduleError for more
    than one stage on a device.
    """
    check_stages_per_device("GPipe", stages_per_device, 1)
    homes = line(n_devices)
    return Schedule("GPipe", n_microbatches, homes, run_forwards_first(homes, n_microbatches))


def looped_bfs(n_devices: int, n_microbatches: int, stages_per_device: int = 2) -> Schedule:
    """Return breadth-first pipelining (Lamy-Poirier 2023): GPipe over several shorter stages on each device.

    On 2 devices with 2 stages each and 4 microbatches (the forwards; the backwards follow in reverse order of stages):

        0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 ...
        1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 ...

    The last device starts after one short stage instead of a long one, so it idles less than under GPipe.
    """
    homes = deal_in_turn(n_devices, stages_per_device)
    return Schedule("LoopedBFS", n_microbatches, homes, run_forwards_first(homes, n_microbatches))


def inference(n_devices: int, n_microbatches: int, stages_per_device: int = 1) -> Schedule:
    """Return the forwards of all microbatches, for outputs without gradients.

    On 2 devices with 4 microbatches:

        0F0 0F1 0F2 0F3
        1F0 1F1 1F2 1F3

    A stage keeps no part of a microbatch after sending its outputs. Raises ScheduleError for more than one stage on a
    device.
    """
    check_stages_per_device("Inference", stages_per_device, 1)
    return run_forwards(line(n_devices), n_microbatches)


def run_forwards(homes: Homes, n_microbatches: int) -> Schedule:
    """Return the schedule of only forwards, in order of stages, for any homes."""
    both = Schedule("Inference", n_microbatches, homes, run_forwards_first(homes, n_microbatches), trains=False)
    return both.only(FORWARD)


def run_forwards_first(homes: Homes, n_microbatches: int) -> Rows:
    """Return all forwards in order of stages, then all backwards in reverse order, for any homes.

    Replicas of a stage take microbatches in turn: the first of two has microbatches 0, 2, 4 and so on.
    """
    n_devices, stages = 1 + max(d for home in homes for d in home), range(len(homes))
    rows: list[list[Action]] = [[] for _ in range(n_devices)]
    for op, order in ((FORWARD, stages), (BACKWARD, stages[::-1])):
        for stage in order:
            for m in range(n_microbatches):
                replica = m % len(homes[stage])
                rows[homes[stage][replica]].append(Action(stage, op, m, replica))
    return tuple(tuple(row) for row in rows)


def one_f_one_b(n_devices: int, n_microbatches: int, stages_per_device: int = 1) -> Schedule:
    """Return 1F1B (PipeDream-flush, Narayanan et al. 2021; DAPPLE, Fan et al. 2021): alternate forwards and backwards.

                  warm-up   then one forward, one backward                  drain
        device 0: F0 F1 F2             B0--- F3 B1---    B2---    B3---
        device 1:    F0 F1       B0--- F2 B1--- F3 B2---    B3---
        device 2:       F0 B0--- F1 B1--- F2 B2--- F3 B3---

    As actions, on 2 devices with 4 microbatches:

        0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
        1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

    It idles as much as GPipe, but stage s holds the activations of at most n_devices - s microbatches. Raises
    ScheduleError for more than one stage on a device.
    """
    check_stages_per_device("1F1B", stages_per_device, 1)
    # Before the first gradient returns, a stage has time for one forward for each stage after it.
    rows = [alternate_on(s, BACKWARD, [0] * n_microbatches, n_devices - s - 1) for s in range(n_devices)]
    return Schedule("1F1B", n_microbatches, line(n_devices), tuple(rows))


def alternate_on(stage: int, backward: str, versions: Sequence[int], warm_up: int) -> tuple[Action, ...]:
    """Return one stage's forwards and backwards in turn. `versions[m]` is the weight version of microbatch m.

    `backward` is the operation of a backward, B or I.
    """
    forwards = [Action(stage, FORWARD, m, version=v) for m, v in enumerate(versions)]
    backwards = [Action(stage, backward, m, version=v) for m, v in enumerate(versions)]
    return alternate(forwards, backwards, warm_up)


def alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """Return `warm_up` forwards, then forwards and backwards in turn, then the remaining backwards.

    `alternate([F0, F1, F2], [B0, B1, B2], 1)` is F0 F1 B0 F2 B1 B2. Both lists have the same length.
    """
    warm_up = min(warm_up, len(forwards))
    row = forwards[:warm_up]
    for i, backward in enumerate(backwards):
        # A slice, which is empty after the last forward.
        row += [*forwards[warm_up + i : warm_up + i + 1], backward]
    return tuple(row)


def interleaved(n_devices: int, n_microbatches: int, stages_per_device: int = 2) -> Schedule:
    """Return Interleaved1F1B (Narayanan et al. 2021, Megatron-LM): 1F1B over several shorter stages on each device.

    On 2 devices with 2 stages each and 4 microbatches:

        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    Microbatches form rounds. A whole round passes a device's first stage, then its second, and so on. It idles less
    than 1F1B and holds more activations. All rounds have the same number of microbatches, at least n_devices: raises
    ScheduleError if n_microbatches cannot be divided like this.
    """
    orders, _ = order_interleaved("Interleaved1F1B", n_devices, n_microbatches, stages_per_device)
    homes = deal_in_turn(n_devices, stages_per_device)
    return Schedule("Interleaved1F1B", n_microbatches, homes, tuple(orders))


def order_interleaved(
    name: str, n_devices: int, n_microbatches: int, stages_per_device: int, *, split: bool = False
) -> tuple[list[tuple[Action, ...]], int]:
    """Return the actions of each device in interleaved order, and the number of microbatches of a round.

    With `split` the backwards are only input gradients, and a device warms up with one forward less for each later
    device. Raises ScheduleError as `interleaved` does.
    """
    # With fewer microbatches in a round than devices, a device would wait for the round to come back.
    rounds = max(1, n_microbatches // n_devices)
    if n_microbatches % rounds:
        raise ScheduleError(
            f"{name}: {n_microbatches} microbatches do not divide into rounds of at least {n_devices}, one "
            f"for each device: give {rounds * n_devices} or {(rounds + 1) * n_devices}"
        )
    size = n_microbatches // rounds
    # A chunk is a device's first, second, ... stage: chunk c of device d is stage c * n_devices + d.
    chunks, op = range(stages_per_device), INPUT_GRADIENT if split else BACKWARD
    rows = []
    for d in range(n_devices):
        # The order of a device's forwards: a round passes its first stage, then its second, and so on.
        turns = [(c, m) for r in range(rounds) for c in chunks for m in range(r * size, (r + 1) * size)]
        forwards = [Action(c * n_devices + d, FORWARD, m) for c, m in turns]
        backwards = [Action((stages_per_device - 1 - c) * n_devices + d, op, m) for c, m in turns]
        # With one stage a device there is nothing to interleave: this is 1F1B.
        warm_up = n_devices - d - 1
        if stages_per_device > 1:
            # Warm up as torch and Megatron do: a round through all but the last chunk, two for each later device.
            warm_up = (1 if split else 2) * warm_up + (stages_per_device - 1) * size
        rows.append(alternate(forwards, backwards, warm_up))
    return rows, size


def chimera(n_devices: int, n_microbatches: int, stages_per_device: int = 1) -> Schedule:
    """Return Chimera (Li and Hoefler 2021): two pipelines in opposite directions, each with half of the microbatches.

        device 0: F0 F1 B1--- B0---      microbatch 0 goes from device 0 to 1,
        device 1: F1 F0 B0--- B1---      microbatch 1 from device 1 to 0

    As actions (`r1` is the second replica of a stage, in the opposite pipeline):

        0F0 1F1r1 1B1r1 0B0 0REDUCE 1REDUCEr1
        0F1r1 1F0 1B0 0B1r1 0REDUCEr1 1REDUCE

    Every device has replicas of two stages, and their gradients are reduced at the end. Each pipeline fills the idle
    time of the other. Raises ScheduleError for an odd number of devices or microbatches, or more than one stage on a
    device.
    """
    check_stages_per_device("Chimera", stages_per_device, 1)
    if n_devices % 2 or n_microbatches % 2:
        what, count = ("devices", n_devices) if n_devices % 2 else ("microbatches", n_microbatches)
        near = f"{count - 1} or {count + 1}" if count > 1 else "2"
        raise ScheduleError(f"Chimera: {count} {what} do not divide into two directions: give {near}")
    homes = cross_both_ways(n_devices)

    def order(a: Action) -> tuple[int, bool, int]:
        # With at most one microbatch a device, backwards come before forwards. With more, prefer the action nearest to
        # the end of its path, so that new microbatches fill the gaps of earlier ones.
        to_go = 0
        if n_microbatches > n_devices:
            to_go = a.microbatch - a.stage if a.op == FORWARD else a.microbatch + 2 * a.stage
        return to_go, a.op == FORWARD, a.microbatch

    rows = list_schedule(homes, n_microbatches, order, most=lambda device: n_devices)
    return Schedule("Chimera", n_microbatches, homes, append_sums(rows, homes))


def check_takes_replicas(name: str) -> None:
    """Raise ScheduleError if a schedule cannot run replicated stages."""
    if name not in REPLICABLE:
        raise ScheduleError(
            f"{name}: the plan gives a stage several devices, which run under {', '.join(REPLICABLE)}: choose one of "
            "these, or plan with partition{model=forwarded}"
        )


def schedule_replicas(name: str, homes: Homes, n_microbatches: int, most: Sequence[int]) -> Schedule:
    """Return GPipe, 1F1B or ZB-H1 over stages with replicas (several devices).

    Replicas take microbatches in turn, and reduce their gradients at the end. `most[s]` limits the microbatches that a
    replica of stage s holds at once: `count_in_flight(homes)` keeps every device busy under 1F1B; GPipe ignores it.
    Raises ScheduleError for other schedules.
    """
    check_takes_replicas(name)
    # A plan gives each device one stage, so the limit of a device is the limit of its stage.
    stage_on = {device: stage for stage, home in enumerate(homes) for device in home}
    if name == "GPipe":
        rows = run_forwards_first(homes, n_microbatches)
    else:
        rows = list_schedule(
            homes,
            n_microbatches,
            # Backwards before forwards, as in 1F1B. Weight gradients only if no other action can start.
            order=lambda a: (a.op == WEIGHT_GRADIENT, a.op == FORWARD, a.microbatch),
            most=lambda device: most[stage_on[device]],
            split=name == "ZB-H1",
        )
    return Schedule(name, n_microbatches, homes, append_sums(rows, homes))


REPLICABLE = ("GPipe", "1F1B", "ZB-H1")
"""The schedules that can run replicated stages."""


def count_in_flight(homes: Homes) -> list[int]:
    """Return the number of microbatches that a replica of each stage holds under 1F1B to keep every device busy.

    It is one microbatch for each device from that stage on, divided by the stage's replicas and rounded up: [3, 1] for
    ((0,), (1, 2)).
    """
    counts = [len(home) for home in homes]
    # The double minus rounds up.
    return [-(-sum(counts[s:]) // count) for s, count in enumerate(counts)]


def append_sums(rows: Rows, homes: Homes) -> Rows:
    """Append a reduction for each replica of a replicated stage."""
    # At the end, when all gradients exist: an earlier reduction would block the device until the other replicas arrive.
    own: list[list[Action]] = [[] for _ in rows]
    for stage, home in enumerate(homes):
        for replica, device in enumerate(home):
            own[device] += [Action(stage, REDUCE, replica=replica)] * (len(home) > 1)
    return tuple((*row, *sums) for row, sums in zip(rows, own, strict=True))


def check_stages_per_device(name: str, stages_per_device: int, count: int) -> None:
    """Raise ScheduleError unless a device has the number of stages that the schedule is made for."""
    if stages_per_device != count:
        others = "Interleaved1F1B or LoopedBFS take any number"
        raise ScheduleError(f"{name}: {stages_per_device} stages a device; it is made for {count}: {others}")
