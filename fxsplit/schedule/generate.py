"""The synchronous schedules, each a pure function of the numbers of devices, microbatches and stages a device."""

from __future__ import annotations

from collections.abc import Sequence

from fxsplit.errors import ScheduleError
from fxsplit.schedule.action import BACKWARD, FORWARD, INPUT_GRADIENT, REDUCE, WEIGHT_GRADIENT, Action
from fxsplit.schedule.greedy import Rows, list_schedule
from fxsplit.schedule.homes import both_ways, line, loop, vee
from fxsplit.schedule.schedule import Homes, Schedule


def gpipe(n_devices: int, n_microbatches: int, stages_per_device: int = 1) -> Schedule:
    """Return GPipe (Huang et al. 2019): all forwards, then all backwards; every microbatch is in flight at once."""
    _exactly("GPipe", stages_per_device, 1)
    homes = line(n_devices)
    return Schedule("GPipe", n_microbatches, homes, all_then_all(homes, n_microbatches))


def looped_bfs(n_devices: int, n_microbatches: int, stages_per_device: int = 2) -> Schedule:
    """Return breadth-first pipelining (Lamy-Poirier 2023): as GPipe, stage by stage over the stages of a device."""
    homes = loop(n_devices, stages_per_device)
    return Schedule("LoopedBFS", n_microbatches, homes, all_then_all(homes, n_microbatches))


def all_then_all(homes: Homes, n_microbatches: int) -> Rows:
    """Return all forwards in order of stages, then all backwards in the reverse, wherever stages live.

    A stage's replicas take microbatches in turn.
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
    """Return 1F1B (PipeDream-flush, DAPPLE): stage s holds at most n_devices - s microbatches."""
    _exactly("1F1B", stages_per_device, 1)
    rows = []
    for stage in range(n_devices):
        forwards = [Action(stage, FORWARD, m) for m in range(n_microbatches)]
        backwards = [Action(stage, BACKWARD, m) for m in range(n_microbatches)]
        rows.append(alternate(forwards, backwards, n_devices - stage - 1))
    return Schedule("1F1B", n_microbatches, line(n_devices), tuple(rows))


def alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """Return `warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    row = forwards[:warm_up]
    for i, backward in enumerate(backwards):
        row += [*forwards[warm_up + i : warm_up + i + 1], backward]
    return tuple(row)


def interleaved(n_devices: int, n_microbatches: int, stages_per_device: int = 2) -> Schedule:
    """Return Interleaved1F1B (Narayanan et al. 2021): microbatches go in rounds through each stage of a device in turn.

    A round has at least as many microbatches as there are devices, and all rounds have equally many.
    """
    rounds = max(1, n_microbatches // n_devices)
    if n_microbatches % rounds:
        raise ScheduleError(
            f"Interleaved1F1B: {n_microbatches} microbatches do not divide into rounds of at least {n_devices}, one "
            f"for each device: give {rounds * n_devices} or {(rounds + 1) * n_devices}"
        )
    size = n_microbatches // rounds
    chunks = range(stages_per_device)
    rows = []
    for d in range(n_devices):
        turns = [(c, m) for r in range(rounds) for c in chunks for m in range(r * size, (r + 1) * size)]
        forwards = [Action(c * n_devices + d, FORWARD, m) for c, m in turns]
        backwards = [Action((stages_per_device - 1 - c) * n_devices + d, BACKWARD, m) for c, m in turns]
        if stages_per_device == 1:
            rows.append(alternate(forwards, backwards, n_devices - d - 1))
        else:
            rows.append(alternate(forwards, backwards, 2 * (n_devices - d - 1) + (stages_per_device - 1) * size))
    return Schedule("Interleaved1F1B", n_microbatches, loop(n_devices, stages_per_device), tuple(rows))


def zb_h1(n_devices: int, n_microbatches: int, stages_per_device: int = 1) -> Schedule:
    """Return ZB-H1 (Qi et al. 2023): 1F1B whose weight gradients wait, on stage s for s microbatches, and fill bubbles.

    Every device holds as much as the first does in 1F1B.
    """
    _exactly("ZB-H1", stages_per_device, 1)
    rows = []
    for stage in range(n_devices):
        forwards = [Action(stage, FORWARD, m) for m in range(n_microbatches)]
        inputs = [Action(stage, INPUT_GRADIENT, m) for m in range(n_microbatches)]
        row: list[Action] = []
        for action in alternate(forwards, inputs, n_devices - stage - 1):
            row.append(action)
            if action.op == INPUT_GRADIENT and action.microbatch >= stage:
                row.append(Action(stage, WEIGHT_GRADIENT, action.microbatch - stage))
        late = range(max(0, n_microbatches - stage), n_microbatches)
        rows.append((*row, *(Action(stage, WEIGHT_GRADIENT, m) for m in late)))
    return Schedule("ZB-H1", n_microbatches, line(n_devices), tuple(rows))


def zbv(n_devices: int, n_microbatches: int, stages_per_device: int = 2) -> Schedule:
    """Return ZBVZeroBubble (Qi et al. 2024): two stages a device, down the line and back, and late weight gradients.

    Forwards and input gradients come before weight gradients, and earlier microbatches before later ones; every device
    holds at most what one microbatch on each device is, of each of its stages.
    """
    _exactly("ZBVZeroBubble", stages_per_device, 2)
    homes = vee(n_devices)
    rows = list_schedule(
        homes,
        n_microbatches,
        order=lambda a: (a.op == WEIGHT_GRADIENT, a.microbatch, -a.stage, a.op),
        most=lambda device: 2 * n_devices,
        split=True,
    )
    return Schedule("ZBVZeroBubble", n_microbatches, homes, rows)


def chimera(n_devices: int, n_microbatches: int, stages_per_device: int = 1) -> Schedule:
    """Return Chimera (Li and Hoefler 2021): two pipelines in opposite directions, each with half of the microbatches.

    Every device has two stages' replicas, whose gradients are summed at the end. With up to a microbatch a device
    backwards come before forwards; with more, a microbatch that is nearer to the end of its way comes first, so that
    the next ones fill the gaps that the first ones leave.
    """
    _exactly("Chimera", stages_per_device, 1)
    if n_devices % 2 or n_microbatches % 2:
        what, count = ("devices", n_devices) if n_devices % 2 else ("microbatches", n_microbatches)
        near = f"{count - 1} or {count + 1}" if count > 1 else "2"
        raise ScheduleError(f"Chimera: {count} {what} do not divide into two directions: give {near}")
    homes = both_ways(n_devices)

    def order(a: Action) -> tuple[int, bool, int]:
        to_go = 0
        if n_microbatches > n_devices:
            to_go = a.microbatch - a.stage if a.op == FORWARD else a.microbatch + 2 * a.stage
        return to_go, a.op == FORWARD, a.microbatch

    rows = list_schedule(homes, n_microbatches, order, most=lambda device: n_devices)
    return Schedule("Chimera", n_microbatches, homes, _reduced(rows, homes))


def replicated(name: str, homes: Homes, n_microbatches: int, most: Sequence[int]) -> Schedule:
    """Return GPipe, 1F1B or ZB-H1 over stages of which some have several devices, their replicas.

    Those take microbatches in turn, and sum their gradients at the end. `most[s]` is how many microbatches a replica of
    stage s may hold at once; for 1F1B to keep every device busy that is `enough(homes)`.
    """
    if name not in REPLICABLE:
        raise ScheduleError(
            f"{name}: the plan gives a stage several devices, which run under {', '.join(REPLICABLE)}: choose one of "
            "these, or plan with partition{model=forwarded}"
        )
    stage_on = {device: stage for stage, home in enumerate(homes) for device in home}
    if name == "GPipe":
        rows = all_then_all(homes, n_microbatches)
    else:
        rows = list_schedule(
            homes,
            n_microbatches,
            order=lambda a: (a.op == WEIGHT_GRADIENT, a.op == FORWARD, a.microbatch),
            most=lambda device: most[stage_on[device]],
            split=name == "ZB-H1",
        )
    return Schedule(name, n_microbatches, homes, _reduced(rows, homes))


REPLICABLE = ("GPipe", "1F1B", "ZB-H1")
"""The schedules that stages with several devices can run under."""


def enough(homes: Homes) -> list[int]:
    """Return how many microbatches a replica of each stage holds in 1F1B: one for each device from there on, shared."""
    counts = [len(home) for home in homes]
    return [-(-sum(counts[s:]) // count) for s, count in enumerate(counts)]


def _reduced(rows: Rows, homes: Homes) -> Rows:
    """Return the rows with a sum of gradients at the end for each replica of a stage that has several."""
    own: list[list[Action]] = [[] for _ in rows]
    for stage, home in enumerate(homes):
        for replica, device in enumerate(home):
            own[device] += [Action(stage, REDUCE, replica=replica)] * (len(home) > 1)
    return tuple((*row, *sums) for row, sums in zip(rows, own, strict=True))


def _exactly(name: str, stages_per_device: int, count: int) -> None:
    """Raise ScheduleError unless a device has as many stages as the schedule is made for."""
    if stages_per_device != count:
        others = "Interleaved1F1B or LoopedBFS take any number"
        raise ScheduleError(f"{name}: {stages_per_device} stages a device; it is made for {count}: {others}")
