"""Starts: orders from which a search begins, the more promising first.

F0, F1, I1 and I0 are the forwards and input gradients of a device's chunks 0 and 1, its first and second stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

import numpy as np

from fxsplit.schedule.action import INPUT_GRADIENT
from fxsplit.schedule.generators.fill import read_kinds
from fxsplit.schedule.generators.synchronous import alternate_on
from fxsplit.schedule.generators.zero_bubble import order_there_and_back
from fxsplit.schedule.kernels import orders
from fxsplit.schedule.kernels.instance import UNLIMITED, Floats, Instance, Ints

PRIORITIES = {
    1: ((2, 1), (1, 2)),
    2: ((4, 3, 2, 1), (3, 4, 1, 2), (4, 2, 3, 1), (3, 2, 4, 1), (2, 4, 1, 3), (3, 1, 2, 4)),
}
"""Priorities to try of F0, I0, F1, I1, by the number of a device's stages. The lowest number runs first."""
MOST_WARM_UPS = 8
"""ZBVZeroBubble is tried with at most this many different numbers of additional forwards."""
PAIR_SHARES = (0.0, 0.45, 0.5, 0.6)
"""The numbers to try of pairs F0 F1 for each additional forward, on a device at the end of the line. With 0.5, all its
additional forwards are in pairs; with 0.6, some of its usual ones as well."""

LAGS = (0.0, 0.5, 1.0)
"""The lags to try in list_repeating_starts. The unit, about one action, is 1/6 of a microbatch's work on a device."""
PERIODS = tuple(1 + share / 20 for share in range(11))
"""The periods to try in list_repeating_starts. The unit is a microbatch's work on the busiest device."""


def list_starts(one: Instance, v_shaped: bool) -> Iterator[Ints]:
    """Yield orders, [devices, entries]. `v_shaped` says that stages go down the line of devices and back."""
    p, v = one.stages.shape
    n = one.n_microbatches
    if v == 1:
        yield from _warm_up(one)
    elif v_shaped:
        yield from _go_there_and_back(one)
    # One microbatch after another fits any memory.
    each = [*range(0, 2 * v, 2), *reversed(range(1, 2 * v, 2))]
    yield np.tile(np.array(each, np.int64), (p, n))
    for rule in list_schedule_rules(one):
        found = list_order(one, *rule)
        if found is not None:
            yield found


def list_schedule_rules(one: Instance) -> Iterator[tuple[tuple[int, ...], Ints, float]]:
    """Yield the priorities, limits and reserves of list schedules to try; see `orders.list_orders`."""
    v = one.stages.shape[1]
    # For how many forwards of the last chunk a list schedule keeps memory free.
    reserves = (1.0, 2.0) if v > 1 and one.memory.min() < UNLIMITED else (1.0,)
    return product(PRIORITIES[v], _list_limits(one), reserves)


def list_low_memory_starts(one: Instance) -> Iterator[Ints]:
    """Yield orders for devices that hold fewer microbatches than there are devices."""
    p, v = one.stages.shape
    for numbers in permutations(range(2 * v)):
        for share in np.linspace(0.5, 1.5, 11):
            # Later devices need fewer forwards ahead.
            most = np.maximum(1, np.round(share * (p - np.arange(p) / 2))).astype(np.int64)
            found = list_order(one, numbers, most, 1.0)
            if found is not None:
                yield found


def list_repeating_starts(one: Instance, head: Floats) -> Iterator[Ints]:
    """Yield orders in which each microbatch repeats the times of the one before, one *period* later.

        device 0:  F . F . F . F          period 2, lag 1
        device 1:  . . F . F . F . F

    A microbatch passes the line of devices four times: with F0, F1, I1 and I0. Each pass has a *lag*, the time for
    which the microbatch waits on each next device while other microbatches go first. Many of the orders do not fit the
    memory. `head` is that of HeadsAndTails.
    """
    p, n = one.n_devices, one.n_microbatches
    each = one.work.max() / n
    soonest = np.append(head[0, :, 0], head[1, ::-1, 0]).reshape(4, p)
    for lags in product(LAGS, repeat=4):
        lag = np.full((4, p), np.array(lags)[:, None] * each / 6)
        # No lag between two passes: the last device of one may be the first of the next.
        lag[:, 0] = 0.0
        begins = (soonest + np.cumsum(lag).reshape(4, p)).reshape(2, 2 * p)
        first = np.stack([begins[0][one.stages], begins[1][::-1][one.stages]], axis=2).reshape(p, 4, 1)
        for period in PERIODS:
            begins_of_all = first + period * each * np.arange(n)
            yield np.argsort(begins_of_all.reshape(p, 4 * n), axis=1, kind="stable") // n


def _warm_up(one: Instance) -> Iterator[Ints]:
    """Yield orders that begin with some forwards on each device, and then do forwards and input gradients in turn.

    The first order is that of 1F1B and ZB-H1, the second that of ZB-H2, and the third begins with more forwards.
    """
    p, n = len(one.stages), one.n_microbatches
    fits = np.floor(np.minimum(one.memory / np.maximum(one.held[one.stages[:, 0]], 1e-12) + 1e-9, n)).astype(int)
    for warm_up in ([p - r for r in range(p)], [2 * (p - r) - 1 for r in range(p)], [2 * p - r for r in range(p)]):
        counts = [max(1, min(fits[r], warm_up[r])) for r in range(p)]
        yield read_kinds(one, [alternate_on(r, INPUT_GRADIENT, [0] * n, counts[r] - 1) for r in range(p)])


def _go_there_and_back(one: Instance) -> Iterator[Ints]:
    """Yield the order of ZBVZeroBubble, and orders that begin with additional forwards for which memory has room.

    On the first device these are F0. Later devices do more of them in pairs F0 F1: they have time for F1, since their
    first input gradient comes later.
    """
    p, n = len(one.stages), one.n_microbatches
    room = max(0, int(min(2 * (one.memory.min() - p), 2 * p, n)))
    for more in range(0, room + 1, 1 + room // MOST_WARM_UPS):
        for share in PAIR_SHARES if more else (0.0,):
            pairs = [int(more * share * device / p) for device in range(p)]
            rows = [order_there_and_back(p, n, d, more - 2 * pairs[d], pairs[d]) for d in range(p)]
            yield read_kinds(one, rows)


def _list_limits(one: Instance) -> Iterator[Ints]:
    """Yield limits, [devices], on how many microbatches are between F0 and I0 of a device."""
    p, v = one.stages.shape
    n, device = one.n_microbatches, np.arange(p)
    if v > 1:
        yield from (np.full(p, most) for most in sorted({n, 2 * p, p, max(1, p // 2)}))
        yield 2 * p - device
        return
    yield from (p - device, 2 * (p - device) - 1, np.full(p, n))
    # As many microbatches as a device needs to stay busy while one goes to the end and back.
    back = np.zeros(p)
    for r in range(p - 2, -1, -1):
        hops = one.forward_hop[r + 1] + one.backward_hop[r + 1] + 2 * one.latency[r + 1]
        back[r] = back[r + 1] + one.forward[r + 1] + one.input[r + 1] + hops
    for each in (one.forward + one.input + one.weight, one.forward + one.input):
        yield np.ceil(back / max(each.max(), 1e-9)).astype(np.int64) + 1


def list_order(one: Instance, priority: tuple[int, ...], most: Ints, reserve: float) -> Ints | None:
    """Return the orders of a list schedule, or None if devices cannot go on; see `orders.list_orders`."""
    p, v = one.stages.shape
    found = np.zeros((p, 2 * v * one.n_microbatches), np.int64)
    state = orders.begin(one)
    done = orders.list_orders(one, np.array(priority, float), most.astype(np.int64), reserve, state, found)
    return found if done else None
