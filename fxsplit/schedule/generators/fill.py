"""Fill: make schedules of orders of forwards and input gradients, with weight gradients (W) in their gaps.

See kernels/orders.py for the rules of the gaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from fxsplit.schedule.action import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from fxsplit.schedule.kernels import compile_kernels, orders, rows
from fxsplit.schedule.kernels.instance import Floats, Instance, Ints, make_instance
from fxsplit.schedule.kernels.orders import State
from fxsplit.schedule.schedule import Homes, Schedule
from fxsplit.schedule.simulation.simulate import Times, check_times, simulate

Orders = Sequence[Sequence[Action]]
"""The forwards and input gradients of each device, in order."""

KINDS = {FORWARD: 0, INPUT_GRADIENT: 1, WEIGHT_GRADIENT: 2}
"""The numbers of the operations in kernels/rows.py."""

Pair = tuple[float, float]
"""The rule of the first device's gaps, and of the last device's. The rules of devices between them change linearly."""
SHARES, FEWER = (0.0, 0.3, 0.6, 0.9, 1.0), (0.0, 1.0)
"""Rules: how much of a W a gap must have room for."""
LARGE = 10_000
"""With at least this many actions, only the rules in FEWER are tried."""
PLAIN = 100_000
"""Up to this many actions, plain Python is faster than the import of numba."""


def fill(
    rows: Orders,
    n_microbatches: int,
    homes: Homes,
    times: Times,
    most: int,
    pairs: Iterable[Pair] | None = None,
) -> Schedule | None:
    """Put W into the gaps of orders, and return the schedule with the shortest step. Return None if none fits.

    - `most`: how many forwards a device may be ahead of its W. A W frees the activations of its forward
    - `pairs`: the shares to try on the first device and on the last (default: all pairs of SHARES, or of FEWER). A gap
      gets a W if it has room for this share of it; 0 puts a W into any gap, and the next action waits
    """
    count = sum(map(len, rows))
    shares = SHARES if count < LARGE else FEWER
    tried = [(first, last) for first in shares for last in shares] if pairs is None else list(pairs)
    each = len(homes) // len(rows)
    one = make_instance(homes, n_microbatches, times, most / each)
    if count * len(tried) > PLAIN:
        compile_kernels()
    kinds = read_kinds(one, rows)
    best, shortest = None, orders.NEVER
    for rules in list_rules(one, tried):
        step, state = evaluate(one, kinds, rules)
        if step < shortest:
            best, shortest = state, step
    return None if best is None else write_schedule(one, kinds, best, homes)


def choose(found: Iterable[Schedule | None], times: Times) -> Schedule:
    """Return the schedule with the shortest simulated step, the first one if several are equal."""
    known = [schedule for schedule in found if schedule is not None]
    return known[0] if len(known) == 1 else min(known, key=lambda schedule: find_step(schedule, times))


def find_step(schedule: Schedule, times: Times) -> float:
    """Return the simulated step of a schedule, in ms. A schedule of only F, I and W takes a faster way than `simulate`.

    Raises ScheduleError for a deadlock, and for times of another number of stages.
    """
    lengths = {len(row) for row in schedule.actions}
    plain = not (schedule.paired or times.forward_launch_ms or times.backward_launch_ms)
    plain &= times.transfers == "asynchronous" and len(lengths) == 1 and all(len(home) == 1 for home in schedule.homes)
    if plain and all(action.op in KINDS for row in schedule.actions for action in row):
        check_times(schedule, times)
        actions = [[(a.stage, KINDS[a.op], a.microbatch) for a in row] for row in schedule.actions]
        one = make_instance(schedule.homes, schedule.n_microbatches, times)
        step = rows.run_rows(one, np.array(actions, np.int64).reshape(len(actions), -1, 3))
        if step != rows.STUCK:
            return float(step)
    return simulate(schedule, times).step_ms


def take_times(name: str, n_microbatches: int, homes: Homes, times: Times | None) -> Times:
    """Return the given times, or unit times if none are given.

    Raises ScheduleError if the times are for a different number of stages.
    """
    if times is not None:
        check_times(Schedule(name, n_microbatches, homes, ()), times)
    return times or Times.unit(len(homes))


def read_kinds(one: Instance, rows: Orders) -> Ints:
    """Return the orders of all devices as kinds, [devices, entries]. A full backward counts as an input gradient."""
    chunk = {int(stage): c for own in one.stages for c, stage in enumerate(own)}
    early = (FORWARD, BACKWARD, INPUT_GRADIENT)
    return np.array([[2 * chunk[a.stage] + (a.op != FORWARD) for a in row if a.op in early] for row in rows], np.int64)


def list_rules(one: Instance, pairs: Iterable[Pair]) -> Iterator[Floats]:
    """Yield the rules of all gaps, [devices, entries], for each pair of a first and a last device's rule."""
    p, v = one.stages.shape
    for first, last in pairs:
        each = first + (last - first) * np.arange(p) / max(1, p - 1)
        yield np.repeat(each[:, None], 2 * v * one.n_microbatches, axis=1)


def evaluate(one: Instance, kinds: Ints, rules: Floats) -> tuple[float, State]:
    """Run orders, and return their step in ms and the state after it. The step is NEVER if the orders cannot run."""
    state = orders.begin(one)
    return orders.run(one, kinds, rules, state, np.full(len(kinds), kinds.shape[1])), state


def write_schedule(one: Instance, kinds: Ints, state: State, homes: Homes) -> Schedule:
    """Return the schedule of orders, from the state after they ran."""
    rows = []
    for r, (order, before) in enumerate(zip(kinds.tolist(), state.before.tolist(), strict=True)):
        row: list[Action] = []
        late = _list_weights(state.queue[r].tolist())
        counts = [0] * (2 * one.stages.shape[1])
        filled = 0
        for kind, count in zip(order, before, strict=True):
            row += late[filled:count]
            filled = count
            action = Action(int(one.stages[r, kind // 2]), INPUT_GRADIENT if kind % 2 else FORWARD, counts[kind])
            counts[kind] += 1
            row.append(action)
        rows.append((*row, *late[filled:]))
    return Schedule("", one.n_microbatches, homes, tuple(rows))


def _list_weights(stages: list[int]) -> list[Action]:
    """Return the W of these stages in this order, with their microbatches."""
    counts = dict.fromkeys(stages, 0)
    found = []
    for stage in stages:
        found.append(Action(stage, WEIGHT_GRADIENT, counts[stage]))
        counts[stage] += 1
    return found
