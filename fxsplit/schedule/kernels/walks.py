"""Narrow the windows of actions by the two rules of solver/windows.py. That file defines the terms used here."""

from __future__ import annotations

from fxsplit.schedule.kernels.instance import Bools, Floats, Instance, Ints

FAR = 1e18
"""The soonest time of a state that no walk reaches, in ms."""


def spread(one: Instance, step: float, head: Floats, last: Floats, changed: Bools, tiny: float) -> None:
    """Narrow the windows by rule 1, along the ways of microbatches, for schedules with a step of `step` ms.

    - `head` and `last`: [F or I, stages, microbatches], the windows in ms, changed in place
    - `changed`: [devices], set to True for each device with a window that narrowed by more than `tiny` ms
    """
    count, n = head.shape[1], head.shape[2]
    for kind in range(2):
        time = one.forward if kind == 0 else one.input
        hop = one.forward_hop if kind == 0 else one.backward_hop
        for turn in range(count):
            s = turn if kind == 0 else count - 1 - turn
            for m in range(n):
                begin = head[kind, s, m]
                if m:
                    begin = max(begin, head[kind, s, m - 1] + time[s])
                if kind == 0 and s:
                    begin = max(begin, head[0, s - 1, m] + time[s - 1] + hop[s] + one.latency[s])
                if kind == 1 and s + 1 < count:
                    begin = max(begin, head[1, s + 1, m] + time[s + 1] + hop[s + 1] + one.latency[s + 1])
                if kind == 1 and s + 1 == count:
                    begin = max(begin, head[0, s, m] + one.forward[s])
                if begin > head[kind, s, m] + tiny:
                    head[kind, s, m] = begin
                    changed[one.device[s]] = True
    for kind in range(1, -1, -1):
        time = one.forward if kind == 0 else one.input
        hop = one.forward_hop if kind == 0 else one.backward_hop
        for turn in range(count):
            s = turn if kind == 1 else count - 1 - turn
            for m in range(n - 1, -1, -1):
                end = last[kind, s, m]
                if m + 1 < n:
                    end = min(end, last[kind, s, m + 1] - time[s])
                if kind == 1:
                    end = min(end, step - one.weight[s])
                if kind == 1 and s:
                    end = min(end, last[1, s - 1, m] - time[s - 1] - hop[s] - one.latency[s])
                if kind == 0 and s + 1 < count:
                    end = min(end, last[0, s + 1, m] - time[s + 1] - hop[s + 1] - one.latency[s + 1])
                if kind == 0 and s + 1 == count:
                    end = min(end, last[1, s, m] - one.input[s])
                if end < last[kind, s, m] - tiny:
                    last[kind, s, m] = end
                    changed[one.device[s]] = True


def _find_done(between: Ints, n_input: int, place: int) -> int:
    """Return how many actions at a place of the chain are done in a state, if `n_input` are done at the chain's end."""
    done = n_input
    for j in range(place, between.size):
        done += between[j]
    return done


def walk_device(
    n: int,
    times: Floats,
    head: Floats,
    last: Floats,
    between: Ints,
    follow: Ints,
    empty: int,
    step: float,
    tiny: float,
    soonest: Floats,
    latest: Floats,
    new_head: Floats,
    new_last: Floats,
) -> bool:
    """Narrow the windows of one device by rule 2. Return True if a walk exists and every action has a window.

    - `times`: [moves], of each F and I of the chain, and of each kind of W, in ms
    - `head`, `last`: [chain, microbatches], the windows; `new_head`, `new_last`: the new windows are written there
    - `between`, `follow`, `empty`: the states of the device; see `States`
    - `step`: the step of the schedules in question. Times that differ by at most `tiny` ms are equal
    - `soonest`, `latest`: [microbatches + 1, states], the times of states are written there. The first index is how
      many actions at the end of the chain are done
    """
    states, moves = follow.shape
    chain = head.shape[0]
    # Forwards through the walks: the soonest time of each state.
    soonest[:] = FAR
    soonest[0, empty] = 0.0
    for i in range(n + 1):
        for c in range(states):
            now = soonest[i, c]
            if now >= FAR:
                continue
            for move in range(moves):
                to = follow[c, move]
                if to < 0:
                    continue
                at = i
                if move < chain:
                    m = _find_done(between[c], i, move)
                    if m >= n:
                        continue
                    end = max(now, head[move, m]) + times[move]
                    if end > last[move, m] + tiny:
                        continue
                    at += move == chain - 1
                else:
                    end = now + times[move]
                    if end > step + tiny:
                        continue
                if end < soonest[at, to]:
                    soonest[at, to] = end
    if soonest[n, empty] > step + tiny:
        return False
    # Backwards: the latest time of each state, and the windows of moves that a walk can make between these times.
    latest[:] = -FAR
    latest[n, empty] = step
    new_head[:] = FAR
    new_last[:] = -FAR
    for i in range(n, -1, -1):
        for c in range(states - 1, -1, -1):
            now = soonest[i, c]
            if now >= FAR:
                continue
            best = latest[i, c]
            for move in range(moves):
                to = follow[c, move]
                if to < 0:
                    continue
                if move >= chain:
                    if now + times[move] <= latest[i, to] + tiny:
                        best = max(best, latest[i, to] - times[move])
                    continue
                m = _find_done(between[c], i, move)
                if m >= n:
                    continue
                end = min(latest[i + (move == chain - 1), to], last[move, m])
                begin = max(now, head[move, m])
                if begin + times[move] <= end + tiny:
                    best = max(best, end - times[move])
                    new_head[move, m] = min(new_head[move, m], begin)
                    new_last[move, m] = max(new_last[move, m], end)
            latest[i, c] = best if best >= now - tiny else -FAR
    return bool(new_head.max() < FAR)


KERNELS = [spread, _find_done, walk_device]
