"""Find lines of stages with a short step: list schedules judge a line, and annealing changes its cuts and replicas.

A line is an array [stages, 4] of begin, end, replicas and recompute; see step/bound.py for the words. Devices are
numbered in the order of stages and of their replicas. List scheduling lets the device that can begin first take its
next action:

- of the forward and the input gradient whose inputs have arrived, the one that its rule prefers; a forward needs memory
- if neither has arrived, a weight gradient (W), unless the next input is known to arrive before a share of W is over
- otherwise it waits for the next input

A stage that recomputes has its activations in memory from its input gradient to its weight gradient. If memory has no
room for more than one microbatch of them, its backward is done in one piece.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fxsplit.planner.step.kernels.arrays import Floats, Ints, Prices, Words

NEVER = 1e300
"""The time of an action whose inputs are not known to arrive yet."""
F, I, W = 0, 1, 2  # noqa: E741 - the names of the actions
WARM_UPS, SHARES = 6, 3
RULES = WARM_UPS * SHARES
"""How many rules of list scheduling there are: limits of forwards that a device is ahead, times shares of W."""


class Stages(NamedTuple):
    """The times of F, I, W of a microbatch and of REDUCE, in ms, of each stage of a line.

    - `replicas`: how many devices share its microbatches
    - `room`: how many microbatches each of them has memory for, at most
    - `late`: how many weight gradients may wait at most when an input gradient begins; -1 if the backward is whole: its
      time is that of the input gradient then, and no weight gradient is written
    """

    forward: Floats
    input: Floats
    weight: Floats
    reduce: Floats
    replicas: Ints
    room: Ints
    late: Ints


class Lattice(NamedTuple):
    """The neighbours of each ideal, one block larger or smaller, CSR: `pointer` [ideals + 1], `near`."""

    pointer: Ints
    near: Ints


class Order(NamedTuple):
    """Room for the actions of each device: `actions` [devices, 3 m, 2] of action and microbatch, `counts` [devices]."""

    actions: Ints
    counts: Ints


def make_stages(most: int) -> Stages:
    """Return room for the times of `most` stages."""
    ones = np.ones(most, np.int64)
    room, late = np.ones(most, np.int64), np.ones(most, np.int64)
    return Stages(np.zeros(most), np.zeros(most), np.zeros(most), np.zeros(most), ones, room, late)


def join_backward(stages: Stages, s: int) -> None:
    """Let a stage do its backward in one piece."""
    stages.input[s] += stages.weight[s]
    stages.weight[s] = 0.0
    stages.late[s] = -1


def price_line(line: Ints, k: int, m: int, prices: Prices, stages: Stages) -> None:
    """Write the times of the k stages of a line, and their room for m microbatches, into `stages`.

    A stage that recomputes runs its forward again in its input gradient. Its activations are in memory from then until
    its weight gradient is done. Weight gradients only wait if that leaves room for all m microbatches.
    """
    for s in range(k):
        begin, end, r = line[s, 0], line[s, 1], line[s, 2]
        stages.forward[s] = prices.forward[end] - prices.forward[begin] + r * (prices.value[begin] + prices.value[end])
        stages.input[s] = prices.input[end] - prices.input[begin] + r * (prices.gradient[begin] + prices.gradient[end])
        stages.weight[s] = prices.weight[end] - prices.weight[begin]
        stages.reduce[s] = (prices.reduce[end] - prices.reduce[begin]) * 4.0 * (r - 1) / r
        stages.replicas[s] = r
        kept = prices.kept[end] - prices.kept[begin]
        room = prices.capacity - (prices.held[end] - prices.held[begin])
        each = kept + prices.taken[begin]
        stages.late[s] = m
        if line[s, 3]:
            stages.input[s] += prices.forward[end] - prices.forward[begin]
            room, each = room - kept, prices.taken[begin]
            if room < m * (each + kept):
                stages.late[s] = int((room - m * each) / max(kept, 1e-300))
            if stages.late[s] < 1:
                join_backward(stages, s)
        stages.room[s] = m if room >= m * each else max(0, int(room * (1 + 1e-9) / max(each, 1e-300)))


def bound_line(k: int, m: int, stages: Stages) -> float:
    """Return a bound of the step of one line in any order: the tests of step/bound.py that need Q_0 and Z_(m-1)."""
    q = z = y = bound = 0.0
    for s in range(k):
        f, i, w, d = stages.forward[s], stages.input[s], stages.weight[s], stages.reduce[s]
        most = (m + stages.replicas[s] - 1) // stages.replicas[s]
        bound = max(bound, q + most * (f + i + w) + d, q + most * (f + i) + z)
        y = max(y + f + i, q + f + most * (i + w) + d, q + f + most * i + z, q + most * f + i + max(z, w + d))
        z = max(z, w + d) + i
        q += f
    return max(bound, y)


def choose_rule(rule: int, k: int, m: int, replicas: Ints, most: Ints) -> tuple[bool, float]:
    """Write the forwards that a replica of each stage is ahead at most; return if forwards go first, and the share.

    Without limits, input gradients go first, or forwards as in GPipe. The other limits are 1F1B's, and a few more.
    """
    warm_up, after = rule % WARM_UPS, 0
    for s in range(k - 1, -1, -1):
        after += replicas[s]
        usual = (after + replicas[s] - 1) // replicas[s]
        if warm_up < 2:
            most[s] = m
        elif warm_up == 2:
            most[s] = usual
        elif warm_up == 3:
            most[s] = usual + 1
        elif warm_up == 4:
            most[s] = 2 * usual
        else:
            most[s] = usual + 2
    return warm_up == 1, 0.5 * (rule // WARM_UPS)


def list_order(
    k: int, m: int, stages: Stages, most: Ints, forward_first: bool, share: float, order: Order, writes: bool
) -> float:
    """Run a list schedule of the k stages of a line; return its step in ms, and write the order if `writes`."""
    replicas, first = stages.replicas, np.zeros(k + 1, np.int64)
    for s in range(k):
        first[s + 1] = first[s] + replicas[s]
    n = first[k]
    stage, ahead = np.zeros(n, np.int64), np.zeros(n, np.int64)
    # The next microbatch of each action.
    turn, inside = np.zeros((n, 3), np.int64), np.zeros(n, np.int64)
    for s in range(k):
        for d in range(first[s], first[s + 1]):
            stage[d] = s
            turn[d, :] = d - first[s]
    forward_end, input_end = np.full((k, m), -1.0), np.full((k, m), -1.0)
    free, start = np.zeros(n), np.zeros(n)
    chosen, stale = np.zeros(n, np.int64), np.ones(n, np.bool_)
    left = 3 * m * k
    while left:
        at = -1
        for d in range(n):
            if stale[d]:
                stale[d] = False
                s, now = stage[d], free[d]
                r = replicas[s]
                arrives = returns = NEVER
                if turn[d, F] < m and ahead[d] < most[s] and inside[d] < stages.room[s]:
                    if s == 0:
                        arrives = 0.0
                    elif forward_end[s - 1, turn[d, F]] >= 0.0:
                        arrives = forward_end[s - 1, turn[d, F]]
                if turn[d, I] < turn[d, F] and (turn[d, I] - turn[d, W]) // r <= max(stages.late[s], 0):
                    if s == k - 1:
                        returns = 0.0
                    elif input_end[s + 1, turn[d, I]] >= 0.0:
                        returns = input_end[s + 1, turn[d, I]]
                soonest = min(arrives, returns)
                waits = turn[d, W] < turn[d, I]
                start[d] = NEVER
                if soonest <= now:
                    start[d] = now
                    chosen[d] = F if arrives <= now and (forward_first or returns > now) else I
                elif waits and now + share * stages.weight[s] <= soonest:
                    start[d], chosen[d] = now, W
                elif soonest < NEVER:
                    start[d] = soonest
                    chosen[d] = F if arrives < returns else I
            if start[d] < NEVER and (at < 0 or start[d] < start[at]):
                at = d
        s, action = stage[at], chosen[at]
        r, microbatch = replicas[s], turn[at, action]
        if writes:
            order.actions[at, order.counts[at], 0] = action
            order.actions[at, order.counts[at], 1] = microbatch
            order.counts[at] += 1
        stale[at] = True
        turn[at, action] += r
        left -= 1
        if action == F:
            free[at] = start[at] + stages.forward[s]
            forward_end[s, microbatch] = free[at]
            ahead[at] += 1
            inside[at] += 1
            if s + 1 < k:
                stale[first[s + 1] + microbatch % replicas[s + 1]] = True
        elif action == I:
            free[at] = start[at] + stages.input[s]
            input_end[s, microbatch] = free[at]
            ahead[at] -= 1
            if stages.weight[s] == 0.0:
                # Nothing is left for later, and what the microbatch held is free.
                if writes and stages.late[s] >= 0:
                    order.actions[at, order.counts[at], 0] = W
                    order.actions[at, order.counts[at], 1] = microbatch
                    order.counts[at] += 1
                turn[at, W] += r
                inside[at] -= 1
                left -= 1
            if s:
                stale[first[s - 1] + microbatch % replicas[s - 1]] = True
        else:
            free[at] = start[at] + stages.weight[s]
            inside[at] -= 1
    step = 0.0
    for d in range(n):
        step = max(step, free[d] + stages.reduce[stage[d]])
    return step


def judge_stages(k: int, m: int, stages: Stages, limit: float, most: Ints, order: Order) -> tuple[float, int]:
    """Return the step of the best list schedule of k stages, in ms, and its rule; a bound of `limit` or more, and -1.

    The bound is NEVER if some stage has no room for a microbatch.
    """
    if stages.room[:k].min() < 1:
        return NEVER, -1
    bound = bound_line(k, m, stages)
    if bound >= limit:
        return bound, -1
    best, found = NEVER, -1
    for rule in range(RULES):
        forward_first, share = choose_rule(rule, k, m, stages.replicas, most)
        step = list_order(k, m, stages, most, forward_first, share, order, False)
        if step < best:
            best, found = step, rule
            if best <= bound * (1 + 1e-9):
                break
    return best, found


def judge_line(
    line: Ints, k: int, m: int, prices: Prices, limit: float, stages: Stages, most: Ints, order: Order
) -> tuple[float, int]:
    """Return the step of a line's best list schedule, and its rule, as `judge_stages` does."""
    price_line(line, k, m, prices, stages)
    return judge_stages(k, m, stages, limit, most, order)


def pack_members(parent: Ints, last: Ints, blocks: int) -> Words:
    """Return a bit for each block inside each ideal, uint64 [ideals, words]."""
    members = np.zeros((parent.size, (blocks + 63) // 64), np.uint64)
    for i in range(1, parent.size):
        members[i] = members[parent[i]]
        members[i, last[i] // 64] |= np.uint64(1) << np.uint64(last[i] % 64)
    return members


def lies_between(members: Words, begin: int, cut: int, end: int) -> bool:
    """Return whether an ideal contains another one, and lies in a third one."""
    for w in range(members.shape[1]):
        if members[begin, w] & ~members[cut, w] or members[cut, w] & ~members[end, w]:
            return False
    return True


def _walk(ideal: int, lattice: Lattice) -> int:
    """Return an ideal near another one: 1 step along the lattice, or more with a chance of a half for each."""
    while True:
        near = lattice.pointer[ideal + 1] - lattice.pointer[ideal]
        if near:
            ideal = lattice.near[lattice.pointer[ideal] + np.random.randint(near)]
        if np.random.random() < 0.5:
            return ideal


def change_line(
    line: Ints, k: int, devices: int, most_replicas: int, prices: Prices, lattice: Lattice, recomputes: bool
) -> int:
    """Change a line at random: move a cut, split a stage, merge two, or change replicas or (if allowed) recompute.

    Returns the new number of stages, or 0 if the change was not possible.
    """
    used = line[:k, 2].sum()
    chance = np.random.random()
    if chance < 0.55:
        if k == 1:
            return 0
        s = np.random.randint(k - 1)
        cut = _walk(line[s, 1], lattice)
        begin, end = line[s, 0], line[s + 1, 1]
        if cut in (begin, end) or not lies_between(prices.members, begin, cut, end):
            return 0
        line[s, 1] = line[s + 1, 0] = cut
        return k
    if chance < 0.65:
        s = np.random.randint(k)
        begin, end = line[s, 0], line[s, 1]
        if used == devices or end - begin < 2:
            return 0
        cut = begin + 1 + np.random.randint(end - begin - 1)
        if not lies_between(prices.members, begin, cut, end):
            return 0
        for t in range(k, s + 1, -1):
            line[t] = line[t - 1]
        line[s + 1, 0], line[s + 1, 1], line[s + 1, 2], line[s + 1, 3] = cut, end, 1, line[s, 3]
        line[s, 1] = cut
        return k + 1
    if chance < 0.73:
        if k == 1:
            return 0
        s = np.random.randint(k - 1)
        line[s, 1] = line[s + 1, 1]
        line[s, 2] = min(most_replicas, line[s, 2] + line[s + 1, 2])
        line[s, 3] = max(line[s, 3], line[s + 1, 3])
        for t in range(s + 1, k - 1):
            line[t] = line[t + 1]
        return k - 1
    s = np.random.randint(k)
    if recomputes and np.random.random() < 0.4:
        line[s, 3] = 1 - line[s, 3]
        return k
    if np.random.random() < 0.5:
        if line[s, 2] >= most_replicas:
            return 0
        if used == devices:
            other = np.random.randint(k)
            if other == s or line[other, 2] == 1:
                return 0
            line[other, 2] -= 1
        line[s, 2] += 1
    else:
        if line[s, 2] == 1:
            return 0
        line[s, 2] -= 1
    return k


def anneal_line(
    line: Ints,
    k: int,
    devices: int,
    m: int,
    most_replicas: int,
    prices: Prices,
    lattice: Lattice,
    steps: int,
    heat: float,
    goal: float,
    seed: int,
    order: Order,
    recomputes: bool,
) -> tuple[float, int]:
    """Anneal a line of k stages, [devices, 4], in place; return the step of the best one, in ms, and its stages.

    A change that makes the step longer by x is kept with probability exp(-x / temperature) (Kirkpatrick et al. 1983).
    The temperature begins at `heat` steps, and falls with the square of the changes that are left.
    """
    np.random.seed(seed)
    stages, most = make_stages(devices), np.zeros(devices, np.int64)
    now, trial, best_line = line.copy(), line.copy(), line.copy()
    step, _ = judge_line(line, k, m, prices, NEVER, stages, most, order)
    best, best_k = step, k
    for it in range(steps):
        if best <= goal:
            break
        trial[:k] = now[:k]
        new_k = change_line(trial, k, devices, most_replicas, prices, lattice, recomputes)
        if not new_k:
            continue
        temperature = heat * best * (1.0 - it / steps) ** 2
        limit = step - temperature * np.log(max(1e-12, np.random.random()))
        found, rule = judge_line(trial, new_k, m, prices, limit, stages, most, order)
        if rule >= 0 and found <= limit:
            step, k = found, new_k
            now[:k] = trial[:k]
            if step < best * (1 - 1e-12):
                best, best_k = step, k
                best_line[:k] = now[:k]
    line[:] = best_line
    return best, best_k


KERNELS = [
    make_stages,
    join_backward,
    price_line,
    bound_line,
    choose_rule,
    pack_members,
    lies_between,
    list_order,
    judge_stages,
    judge_line,
    _walk,
    change_line,
    anneal_line,
]
