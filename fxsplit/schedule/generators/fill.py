"""Fill: put weight gradients (W) into the gaps that forwards and input gradients (F and I) leave on each device.

    F and I alone:   F0 F1 .  .  I0 F2 .  I1 .  I2         a gap while an input is on its way
    filled:          F0 F1 .  .  I0 F2 W0 I1 W1 I2 W2

The order of F and I is given. Nothing that a device waits for depends on its own W in the gap, so the end of each gap
is known when it begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from fxsplit.schedule.action import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from fxsplit.schedule.flow import find_message, find_needs
from fxsplit.schedule.schedule import Homes, Schedule
from fxsplit.schedule.simulation.simulate import Times, check_times, simulate

Orders = Sequence[Sequence[Action]]
"""The forwards and input gradients of each device, in order."""

SHARES, FEWER = (0.0, 0.3, 0.6, 0.9, 1.0), (0.0, 1.0)
"""How much of a W a gap must have room for, on the first device and on the last; linear between them."""
LARGE = 10_000
"""The number of actions from which on only FEWER are tried."""


def fill_gaps(
    orders: Orders, n_microbatches: int, homes: Homes, times: Times, most: int, shares: Sequence[float]
) -> Schedule | None:
    """Return the schedule with a W in each gap that is long enough, the oldest first; None if it does not fit.

    - `most`: the forwards that a device may be ahead of its W, which free their activations
    - `shares[d]`: how much of a W a gap of device d must have room for; 0 puts a W into any gap, and the next action
      waits
    """
    bare = Schedule("", n_microbatches, homes, tuple(map(tuple, orders)))
    rows: list[list[Action]] = [[] for _ in orders]
    late: list[deque[Action]] = [deque() for _ in orders]
    at, held, now = [0] * len(rows), [0] * len(rows), [0.0] * len(rows)
    ends: dict[Action, float] = {}
    arrivals: dict[Action, float] = {}
    links: dict[tuple[int, int], float] = {}

    def run(device: int, action: Action, begin: float) -> None:
        now[device] = max(now[device], begin) + times.of(action)
        rows[device].append(action)
        held[device] += (action.op == FORWARD) - (action.op == WEIGHT_GRADIENT)

    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            while at[device] < len(order):
                action = order[at[device]]
                needs = find_needs(bare, action)
                if any(need not in (ends if boundary is None else arrivals) for need, boundary in needs):
                    break
                begin = max((ends[n] if boundary is None else arrivals[n] for n, boundary in needs), default=0.0)
                while late[device] and begin - now[device] > max(1e-9, shares[device] * times.of(late[device][0])):
                    run(device, late[device].popleft(), 0.0)
                while action.op == FORWARD and held[device] == most:
                    if not late[device]:
                        return None
                    run(device, late[device].popleft(), 0.0)
                run(device, action, begin)
                ends[action] = now[device]
                message = find_message(bare, action)
                if message is not None:
                    link = message.source, message.destination
                    links[link] = max(links.get(link, 0.0), now[device]) + times.hop(message)
                    arrivals[action] = links[link] + times.latency(message)
                if action.op == INPUT_GRADIENT:
                    late[device].append(action._replace(op=WEIGHT_GRADIENT))
                at[device] += 1
                moved = True
    if any(done < len(order) for done, order in zip(at, orders, strict=True)):
        return None
    return Schedule("", n_microbatches, homes, tuple((*row, *rest) for row, rest in zip(rows, late, strict=True)))


def list_filled(
    orders: Orders,
    n_microbatches: int,
    homes: Homes,
    times: Times,
    most: int,
    pairs: Iterable[tuple[float, float]] | None = None,
) -> Iterator[Schedule]:
    """Yield schedules of orders, each with W in other gaps; none if the orders need more than `most` in flight.

    `pairs` are the shares to try on the first device and on the last (default: all pairs of SHARES, or of FEWER).
    """
    shares_of_ends = SHARES if sum(map(len, orders)) < LARGE else FEWER
    for first, last in product(shares_of_ends, repeat=2) if pairs is None else pairs:
        steps = max(1, len(orders) - 1)
        shares = [first + (last - first) * device / steps for device in range(len(orders))]
        filled = fill_gaps(orders, n_microbatches, homes, times, most, shares)
        if filled is not None:
            yield filled


def choose(found: Iterable[Schedule], times: Times) -> Schedule:
    """Return the schedule with the shortest simulated step, the first of several."""
    # Most fills are equal, and simulating takes longer than comparing.
    return min(dict.fromkeys(found), key=lambda schedule: simulate(schedule, times).step_ms)


def take_times(name: str, n_microbatches: int, homes: Homes, times: Times | None) -> Times:
    """Return the times that are given, or equal ones; raises ScheduleError for times of another number of stages."""
    if times is not None:
        check_times(Schedule(name, n_microbatches, homes, ()), times)
    return times or Times.unit(len(homes))
