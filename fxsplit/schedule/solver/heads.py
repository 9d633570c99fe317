"""Heads and tails of actions, and the bounds of a step that follow from them without a search.

The *head* of an action is the earliest time at which it can begin. Its *tail* is the least time from its end to the end
of the step:

    |<---- head ---->|= action =|<---- tail ---->|
    0                                            end of the step

An action is F, I or W: the forward, the input gradient or the weight gradient of a microbatch on a stage. The *way* of
a microbatch is its F through all stages, and then its I through all stages back.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np

from fxsplit.schedule.kernels.instance import Floats, Instance


class HeadsAndTails(NamedTuple):
    """Heads and tails in ms.

    - `head` and `tail`: [F or I, stages, microbatches]
    - `weight_head` and `weight_tail`: [stages, microbatches], of W
    """

    head: Floats
    tail: Floats
    weight_head: Floats
    weight_tail: Floats


def _run_in_turn(ready: Floats, each: float) -> Floats:
    """Return the begins of actions that run one after another. Each takes `each` ms, and waits until it is `ready`."""
    shift = np.arange(len(ready)) * each
    begins: Floats = np.maximum.accumulate(ready - shift) + shift
    return begins


def _send(made: Floats, hop: float, latency: float) -> Floats:
    """Return when messages arrive, in ms, that were `made` in this order.

    Each keeps the link busy for `hop` ms, and arrives `latency` ms later.
    """
    return _run_in_turn(made, hop) + hop + latency


def find_heads(one: Instance) -> HeadsAndTails:
    """Return the heads and tails.

    They follow from three facts: a microbatch goes its way, a stage does the microbatches in order, and a link takes
    one message at a time.
    """
    count, n = one.device.size, one.n_microbatches
    head, tail = np.zeros((2, count, n)), np.zeros((2, count, n))
    weight_head, weight_tail = np.zeros((count, n)), np.zeros((count, n))
    for s in range(count):
        if s:
            head[0, s] = _send(head[0, s - 1] + one.forward[s - 1], one.forward_hop[s], one.latency[s])
        head[0, s] = _run_in_turn(head[0, s], one.forward[s])
    for s in reversed(range(count)):
        if s == count - 1:
            head[1, s] = head[0, s] + one.forward[s]
        else:
            made = head[1, s + 1] + one.input[s + 1]
            head[1, s] = _send(made, one.backward_hop[s + 1], one.latency[s + 1])
        head[1, s] = _run_in_turn(head[1, s], one.input[s])
        weight_head[s] = _run_in_turn(head[1, s] + one.input[s], one.weight[s])
    # Tails are heads of the step run backwards: the last microbatch first.
    for s in range(count):
        weight_tail[s] = np.arange(n)[::-1] * one.weight[s]
        after = weight_tail[s] + one.weight[s]
        if s:
            received = tail[1, s - 1] + one.input[s - 1] + one.latency[s]
            after = np.maximum(after, _run_in_turn(received[::-1], one.backward_hop[s])[::-1] + one.backward_hop[s])
        tail[1, s] = _run_in_turn(after[::-1], one.input[s])[::-1]
    for s in reversed(range(count)):
        if s == count - 1:
            after = tail[1, s] + one.input[s]
        else:
            received = tail[0, s + 1] + one.forward[s + 1] + one.latency[s + 1]
            after = _run_in_turn(received[::-1], one.forward_hop[s + 1])[::-1] + one.forward_hop[s + 1]
        tail[0, s] = _run_in_turn(after[::-1], one.forward[s])[::-1]
    return HeadsAndTails(head, tail, weight_head, weight_tail)


def bound_by_ways(one: Instance, heads: HeadsAndTails) -> float:
    """Return the bound from the ways of microbatches, in ms: the largest sum of an action's head, time and tail."""
    times = np.stack([one.forward, one.input])[:, :, None]
    ways = (heads.head + times + heads.tail).max()
    return float(max(ways, (heads.weight_head + one.weight[:, None] + heads.weight_tail).max()))


def bound_by_work(one: Instance, heads: HeadsAndTails) -> float:
    """Return the bound from the work of each device, in ms: the largest of the devices' bounds.

    A device does all its actions one at a time, each after its head and before its tail. Its bound is the least time
    for this if it may interrupt an action and go on later. It is then best to do the action with the longest tail first
    (Jackson 1955).
    """
    best = 0.0
    for own in one.stages:
        jobs = []
        for s in own:
            for firsts, each, lasts in (
                (heads.head[0, s], one.forward[s], heads.tail[0, s]),
                (heads.head[1, s], one.input[s], heads.tail[1, s]),
                (heads.weight_head[s], one.weight[s], heads.weight_tail[s]),
            ):
                jobs += [(head, float(each), tail) for head, tail in zip(firsts.tolist(), lasts.tolist(), strict=True)]
        best = max(best, _run_interrupted(sorted(jobs)))
    return best


def _run_interrupted(jobs: list[tuple[float, float, float]]) -> float:
    """Return the least time in which one machine does all jobs and their tails have passed, if it may interrupt jobs.

    `jobs` are (head, time, tail), sorted by their heads.
    """
    best, now, at = 0.0, 0.0, 0
    heap: list[tuple[float, float]] = []
    while at < len(jobs) or heap:
        if not heap:
            now = max(now, jobs[at][0])
        while at < len(jobs) and jobs[at][0] <= now + 1e-12:
            heapq.heappush(heap, (-jobs[at][2], jobs[at][1]))
            at += 1
        tail, left = heapq.heappop(heap)
        until = min(now + left, jobs[at][0] if at < len(jobs) else np.inf)
        left -= until - now
        now = until
        if left <= 1e-12:
            best = max(best, now - tail)
        else:
            heapq.heappush(heap, (tail, left))
    return best


def bound_by_memory(one: Instance, heads: HeadsAndTails) -> float:
    """Return the bound from memory, in ms: the largest sum of a device's work and the time for which it must idle.

    A device whose memory does not hold all its forwards idles twice, here with memory for 3 of 9 microbatches:

        F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4  ...  F8 .  .  I6 W6 I7 W7 I8 W8
                 before                           after

    - before its first I: while the first microbatch goes through all stages and back to the device, the device can only
      do the forwards that fit in its memory
    - after its last F: while the last microbatch goes on to the end and back to stage 0, the device can only do the I
      and W of the microbatches that its memory holds
    """
    best = 0.0
    n = one.n_microbatches
    for r, own in enumerate(one.stages):
        if n * one.held[own].sum() <= one.memory[r] + 1e-9:
            continue
        first = min(heads.head[1, s, 0] for s in own)
        before = max(heads.head[0, own[0], 0], first - _find_most_forwards(one, r))
        # The last F of a device is that of the last microbatch on the last of its stages.
        after = max(0.0, heads.tail[0, own[-1], n - 1] - _find_most_left(one, r))
        best = max(best, float(before + one.work[r] + after))
    return best


def _find_most_forwards(one: Instance, r: int) -> float:
    """Return the longest time, in ms, for which a device can do forwards before its memory is full."""
    own, n, room = one.stages[r], one.n_microbatches, one.memory[r]
    held, times = one.held[own], one.forward[own]
    most = _count_fitting(room, held[0], n)
    counts = np.arange(int(most) + 1)
    if len(own) == 1:
        return float(most * times[0])
    rest = _count_fitting(room - counts * held[0], held[1], n)
    return float((counts * times[0] + rest * times[1]).max())


def _count_fitting(room: Any, held: float, n: int) -> Any:
    """Return how many of `n` microbatches fit in `room`; each holds `held`. All fit if they hold nothing."""
    return np.minimum(np.floor((room + 1e-9) / max(held, 1e-12)), n)


def _find_most_left(one: Instance, r: int) -> float:
    """Return the longest time, in ms, for which a device can do the I and W of the microbatches in its memory.

    A microbatch before its I holds its whole memory, and has I and W left. A microbatch between its I and its W holds
    only the part that W frees, and has W left.
    """
    own, n, room = one.stages[r], one.n_microbatches, one.memory[r]
    held, late = one.held[own], one.late[own]
    most = [np.arange(int(_count_fitting(room, h, n)) + 1) for h in held]
    grid = np.meshgrid(*most)
    rest = room - sum(count * h for count, h in zip(grid, held, strict=True))
    left = sum(count * (one.input[s] + one.weight[s]) for count, s in zip(grid, own, strict=True))
    if late.min() <= 0:
        # A W that frees no memory may be left in any number.
        more = n * one.weight[own].sum() - sum(count * one.weight[s] for count, s in zip(grid, own, strict=True))
    else:
        # If all W free the same memory, a whole number of the longest fits. Otherwise fill the rest with the W that
        # takes most time for its memory, even with a part of it.
        share = (one.weight[own] / late).max()
        alike = len({*late}) == 1
        more = np.floor((rest + 1e-9) / late[0]) * one.weight[own].max() if alike else (rest + 1e-9) * share
        more = np.minimum(more, n * one.weight[own].sum())
    return float(np.where(rest >= -1e-9, left + more, 0.0).max())
