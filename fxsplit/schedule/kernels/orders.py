"""Run, make and change orders of forwards and input gradients (F and I), with weight gradients (W) in their gaps.

    only F and I:   F0 F1 .  .  I0 F2 .  I1 .  I2         a gap is idle time before an entry whose input is on its way
    filled:         F0 F1 .  .  I0 F2 W0 I1 W1 I2 W2

Each entry of an order has a *rule*, which says which W go into the gap before it:

    rule 0.6    a W goes into the gap if at least 0.6 of its time is left there, and so on with the next W
    rule -0.6   one W goes there in any case, and more W as under 0.6
    rule 2.6    as 0.6, but before this gap the waiting W are sorted: all W of the other chunk come first, then the
                W of the chunk that has the oldest one

Otherwise the oldest W goes first. If memory is too short for the next F, W run before it in any case. While a device
waits for an input, nothing that it does can change when that input arrives. So the end of a gap is known at its begin.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fxsplit.schedule.kernels.instance import Floats, Instance, Ints

NEVER = 1e18
"""The time of what never happens: the step of orders that cannot run."""
OTHER = 2.0
"""A rule of at least this size, positive or negative, puts the W of the other chunk first."""
TINY = 1e-9
"""Times and memory that differ by at most this are equal: sums in a different order differ in their last digits."""


class State(NamedTuple):
    """How far each device has come. Arrays have one entry for each device unless stated.

    - `free`: when it is free, in ms; `at`: how many entries of its order are done
    - `counts`: [devices, kinds], how many of each kind are done
    - `used`: the memory in use
    - `queue`: [devices, W], the stage of each W in order: first the done W, then the waiting ones
    - `made`: how many W are in the queue, and `done`: how many of them are done
    - `links`: [links], when a link is free
    - `values` and `gradients`: [stages, microbatches], when the input of an F or I arrives; -1 if that is not known
    - `begins`: [devices, entries], when an entry begins, and `before`: how many W come before it
    """

    free: Floats
    at: Ints
    counts: Ints
    used: Floats
    queue: Ints
    made: Ints
    done: Ints
    links: Floats
    values: Floats
    gradients: Floats
    begins: Floats
    before: Ints


class Suffix(NamedTuple):
    """The part of an order after a moment: only this part changes, and runs again.

    - `start`: the state at that moment
    - `microbatch`: the first microbatch of which a device has an F or I left
    - `weight`: the first place in the queues of W at which the W of a device is not done
    """

    start: State
    microbatch: int
    weight: int


class Candidates(NamedTuple):
    """The orders and rules of an annealing, [devices, entries]: the current ones, those on trial, and the best so far.

    `figures` has two entries in ms: the cost of the current orders, and the step of the best ones.
    """

    orders: Ints
    rules: Floats
    trial_orders: Ints
    trial_rules: Floats
    best_orders: Ints
    best_rules: Floats
    figures: Floats


class Cooling(NamedTuple):
    """The settings of an annealing of `steps` steps. Its *cost* is the step plus `side` times the devices' mean end.

    - `temperature`: at the beginning, in ms
    - `least`: a device that ends before `least` ms counts as one that ends then
    - `by_gap`: whether a change of rules is for one gap, not for a whole device
    - `mixed`: whether rules may put the W of the other chunk first
    - `goal`: the step at which to stop, in ms
    """

    steps: int
    temperature: float
    side: float
    least: float
    by_gap: bool
    mixed: bool
    goal: float


def begin(one: Instance) -> State:
    """Return the state before the first action."""
    p, v = one.stages.shape
    n, kinds = one.n_microbatches, 2 * v
    values = np.full((v * p, n), -1.0)
    values[0] = 0.0
    return State(
        np.zeros(p),
        np.zeros(p, np.int64),
        np.zeros((p, kinds), np.int64),
        np.zeros(p),
        np.zeros((p, v * n), np.int64),
        np.zeros(p, np.int64),
        np.zeros(p, np.int64),
        np.zeros(one.n_links),
        values,
        np.full((v * p, n), -1.0),
        np.zeros((p, kinds * n)),
        np.zeros((p, kinds * n), np.int64),
    )


def run(one: Instance, orders: Ints, rules: Floats, state: State, stop: Ints) -> float:
    """Run orders from a state until each device has done `stop` entries, and return the end in ms.

    The remaining W run after the last entry of an order. Return NEVER if the devices wait for each other, or if there
    is no memory for an F.
    """
    # Locals, since taking an array out of a tuple costs more than an action.
    n_stages, p, entries = one.device.size, orders.shape[0], orders.shape[1]
    stages, memory, held, late = one.stages, one.memory, one.held, one.late
    forward_time, input_time, weight, latency = one.forward, one.input, one.weight, one.latency
    forward_hop, backward_hop = one.forward_hop, one.backward_hop
    forward_link, backward_link = one.forward_link, one.backward_link
    free, at, counts, used, links = state.free, state.at, state.counts, state.used, state.links
    queue, made, done = state.queue, state.made, state.done
    values, gradients, begins, before = state.values, state.gradients, state.begins, state.before
    left = 0
    for r in range(p):
        left += stop[r] - at[r]
    moved = True
    while moved:
        moved = False
        for r in range(p):
            now = free[r]
            i = at[r]
            while i < stop[r]:
                kind = orders[r, i]
                stage = stages[r, kind // 2]
                forward = kind % 2 == 0
                m = counts[r, kind]
                ready = values[stage, m] if forward else gradients[stage, m]
                if ready < 0.0:
                    break
                forced = rules[r, i] < 0.0
                share = abs(rules[r, i])
                if share >= OTHER:
                    share -= OTHER
                    first, place = queue[r, done[r]], done[r]
                    for j in range(done[r], made[r]):
                        other = queue[r, j]
                        if other != first:
                            # W of one stage are alike, so a swap keeps their order.
                            queue[r, j] = first
                            queue[r, place] = other
                            place += 1
                # W fill the gap, or make room in memory.
                while True:
                    short = forward and used[r] + held[stage] > memory[r] + TINY
                    if done[r] == made[r]:
                        if short:
                            return NEVER
                        break
                    oldest = queue[r, done[r]]
                    fits = ready > now + TINY and ready - now >= share * weight[oldest]
                    if not (short or forced or fits):
                        break
                    forced = False
                    now += weight[oldest]
                    used[r] -= late[oldest]
                    done[r] += 1
                now = max(now, ready)
                begins[r, i] = now
                before[r, i] = done[r]
                if forward:
                    used[r] += held[stage]
                    now += forward_time[stage]
                    if stage + 1 < n_stages:
                        arrival = now
                        link = forward_link[stage + 1]
                        if link >= 0:
                            links[link] = max(links[link], now) + forward_hop[stage + 1]
                            arrival = links[link] + latency[stage + 1]
                        values[stage + 1, m] = arrival
                    else:
                        gradients[stage, m] = now
                else:
                    used[r] -= held[stage] - late[stage]
                    queue[r, made[r]] = stage
                    made[r] += 1
                    now += input_time[stage]
                    if stage:
                        arrival = now
                        link = backward_link[stage]
                        if link >= 0:
                            links[link] = max(links[link], now) + backward_hop[stage]
                            arrival = links[link] + latency[stage]
                        gradients[stage - 1, m] = arrival
                counts[r, kind] = m + 1
                i += 1
                left -= 1
                moved = True
            at[r] = i
            if i == entries:
                while done[r] < made[r]:
                    now += weight[queue[r, done[r]]]
                    done[r] += 1
            free[r] = now
    return NEVER if left else free.max()


def _send(
    ready: float,
    links: Floats,
    arrivals: Floats,
    hops: Floats,
    latencies: Floats,
    link: int,
    boundary: int,
    stage: int,
    m: int,
) -> None:
    """Set the arrival of a result that is `ready` at that time, in ms. A link takes one message at a time."""
    if link >= 0:
        ready = max(links[link], ready) + hops[boundary]
        links[link] = ready
        ready += latencies[boundary]
    arrivals[stage, m] = ready


def list_orders(one: Instance, priority: Floats, most: Ints, reserve: float, state: State, orders: Ints) -> bool:
    """Write orders by list scheduling; return whether all actions could be placed.

    The device that can start an action first is next. Of the kinds that it can start now, it takes the one with the
    lowest `priority`, or a W if it can start none. A device has at most `most` microbatches between F and I of its
    first chunk, and keeps memory free for `reserve` forwards of its last chunk.
    """
    n, n_stages, (p, v) = one.n_microbatches, one.device.size, one.stages.shape
    stages, device, memory, held, late = one.stages, one.device, one.memory, one.held, one.late
    times, weight, latency = (one.forward, one.input), one.weight, one.latency
    forward_hop, backward_hop = one.forward_hop, one.backward_hop
    forward_link, backward_link = one.forward_link, one.backward_link
    free, at, counts, used, links = state.free, state.at, state.counts, state.used, state.links
    queue, made, done, values, gradients = state.queue, state.made, state.done, state.values, state.gradients
    # When each device could begin each kind, or NEVER if it may not, and the soonest of these times.
    starts, soonest = np.full((p, 2 * v), NEVER), np.full(p, NEVER)
    stale = np.ones(p, np.bool_)
    left = orders.size
    while left:
        r = -1
        for d in range(p):
            if stale[d]:
                stale[d] = False
                soonest[d] = free[d] if done[d] < made[d] else NEVER
                for kind in range(2 * v):
                    m, stage = counts[d, kind], stages[d, kind // 2]
                    starts[d, kind] = NEVER
                    if m == n:
                        continue
                    ready = gradients[stage, m] if kind % 2 else values[stage, m]
                    if kind % 2 == 0:
                        room = memory[d]
                        # An earlier chunk leaves room for the last one: otherwise nothing could free memory.
                        if kind < 2 * v - 2 and counts[d, 2 * v - 2] < n:
                            room -= reserve * held[stages[d, v - 1]]
                        if used[d] + held[stage] > room + TINY or (kind == 0 and m - counts[d, 1] >= most[d]):
                            continue
                    if ready >= 0.0:
                        starts[d, kind] = ready
                        soonest[d] = min(soonest[d], max(ready, free[d]))
            if soonest[d] < NEVER and (r < 0 or soonest[d] < soonest[r]):
                r = d
        if r < 0:
            return False
        now = soonest[r]
        chosen = -1
        for kind in range(2 * v):
            if starts[r, kind] <= now + TINY and (chosen < 0 or priority[kind] < priority[chosen]):
                chosen = kind
        stale[r] = True
        if chosen < 0:
            oldest = queue[r, done[r]]
            free[r] = now + weight[oldest]
            used[r] -= late[oldest]
            done[r] += 1
            continue
        m, stage = counts[r, chosen], stages[r, chosen // 2]
        orders[r, at[r]] = chosen
        at[r] += 1
        counts[r, chosen] += 1
        left -= 1
        if chosen % 2 == 0:
            used[r] += held[stage]
            free[r] = now + times[0][stage]
            if stage + 1 < n_stages:
                link = forward_link[stage + 1]
                _send(free[r], links, values, forward_hop, latency, link, stage + 1, stage + 1, m)
                stale[device[stage + 1]] = True
            else:
                gradients[stage, m] = free[r]
        else:
            used[r] -= held[stage] - late[stage]
            queue[r, made[r]] = stage
            made[r] += 1
            free[r] = now + times[1][stage]
            if stage:
                _send(free[r], links, gradients, backward_hop, latency, backward_link[stage], stage, stage - 1, m)
                stale[device[stage - 1]] = True
    return True


def _shift(row: Ints, start: int, kind: int, done: int, first: int, last: int, distance: int) -> None:
    """Move the entries of one kind for microbatches `first` to `last` by `distance` places in a row.

    Move them to earlier places if `distance` is negative. Entries before place `start` do not move; `done` of them are
    of this kind. An entry never passes another one of its own kind.
    """
    entries = row.size
    step = 1 if distance > 0 else -1
    if distance > 0:
        i = entries - 1
        m = -1
        for j in range(start, entries):
            if row[j] == kind:
                m += 1
        m += done
    else:
        i = start
        m = done
    while start <= i < entries:
        if row[i] == kind:
            if first <= m <= last:
                j = i
                for _ in range(abs(distance)):
                    if not (start <= j + step < entries) or row[j + step] == kind:
                        break
                    row[j] = row[j + step]
                    row[j + step] = kind
                    j += step
            m -= step
            if (m < first and distance > 0) or (m > last and distance < 0):
                break
        i -= step


def _return_to(suffix: Suffix, state: State) -> None:
    """Set a state back to the beginning of the suffix."""
    start = suffix.start
    state.free[:] = start.free
    state.at[:] = start.at
    state.counts[:] = start.counts
    state.used[:] = start.used
    state.made[:] = start.made
    state.done[:] = start.done
    state.links[:] = start.links
    state.values[:, suffix.microbatch :] = start.values[:, suffix.microbatch :]
    state.gradients[:, suffix.microbatch :] = start.gradients[:, suffix.microbatch :]
    state.queue[:, suffix.weight :] = start.queue[:, suffix.weight :]


def _count_up(chance: float) -> int:
    """Return a random whole number of at least 1: k + 1 or more with probability `chance` to the power of k."""
    count = 1
    while np.random.random() < chance:
        count += 1
    return count


def _change_rules(rules: Floats, start: Ints, by_gap: bool, mixed: bool) -> tuple[int, int]:
    """Change the rules of a gap or of some devices at random; return the first and the last changed device."""
    p, entries = rules.shape
    r = np.random.randint(p)
    if by_gap:
        chance = np.random.random()
        # A rule of -1e-9 puts one W into the gap in any case, and more W as rule 0 does.
        rule = 0.0 if chance < 0.4 else 1.0 if chance < 0.7 else -1e-9 if chance < 0.85 else -1.0
        if mixed and np.random.random() < 0.3:
            rule += OTHER if rule >= 0.0 else -OTHER
        if np.random.random() < 0.1:
            rules[r, start[r] :] = abs(rule)
        elif start[r] < entries:
            i = start[r] + np.random.randint(entries - start[r])
            rules[r, i : i + _count_up(0.4)] = rule
        return r, r
    rule = np.random.random() * 1.3
    if np.random.random() < 0.3:
        rule = 0.0
    last = r if np.random.random() < 0.5 else p - 1
    for d in range(r, last + 1):
        rules[d, start[d] :] = rule
    return r, last


def _change_orders(orders: Ints, suffix: Suffix, n: int) -> tuple[int, int]:
    """Move random entries of one kind on neighbouring devices; return the first and the last of these devices."""
    p = orders.shape[0]
    r = np.random.randint(p)
    last = r
    if np.random.random() < 0.6:
        last = min(p - 1, r + np.random.randint(p))
    kind = np.random.randint(suffix.start.counts.shape[1])
    m = suffix.microbatch + np.random.randint(n - suffix.microbatch)
    m_last = m
    if np.random.random() < 0.3:
        m_last = min(n - 1, m + np.random.randint(n - suffix.microbatch))
    distance = _count_up(0.4)
    if np.random.random() < 0.5:
        distance = -distance
    for d in range(r, last + 1):
        _shift(orders[d], suffix.start.at[d], kind, suffix.start.counts[d, kind], m, m_last, distance)
    return r, last


def _run_suffix(
    one: Instance, orders: Ints, rules: Floats, suffix: Suffix, state: State, stop: Ints, cooling: Cooling
) -> tuple[float, float]:
    """Run the suffix of orders, and return the step and its cost (see Cooling) in ms, or NEVER for both."""
    _return_to(suffix, state)
    step = run(one, orders, rules, state, stop)
    if step >= NEVER:
        return NEVER, NEVER
    return step, step + cooling.side * np.maximum(state.free, cooling.least).mean()


def anneal(
    one: Instance,
    tried: Candidates,
    suffix: Suffix,
    state: State,
    stop: Ints,
    cooling: Cooling,
    first: int,
    last: int,
) -> bool:
    """Do the steps `first` to `last` - 1 of an annealing; return whether it has reached its goal.

    A change that makes the cost higher by x is kept with probability exp(-x / temperature) (Kirkpatrick et al. 1983).
    The temperature is proportional to the square of the number of steps that are left.
    """
    for i in range(first, last):
        if tried.figures[1] <= cooling.goal:
            return True
        temperature = cooling.temperature * (1 - i / cooling.steps) ** 2 + 1e-12
        if np.random.random() < (0.25 if cooling.by_gap else 0.05):
            r, r_last = _change_rules(tried.trial_rules, suffix.start.at, cooling.by_gap, cooling.mixed)
        else:
            r, r_last = _change_orders(tried.trial_orders, suffix, one.n_microbatches)
        step, cost = _run_suffix(one, tried.trial_orders, tried.trial_rules, suffix, state, stop, cooling)
        now = tried.figures[0]
        if step < NEVER and (cost <= now or np.random.random() < np.exp((now - cost) / temperature)):
            tried.figures[0] = cost
            tried.orders[r : r_last + 1] = tried.trial_orders[r : r_last + 1]
            tried.rules[r : r_last + 1] = tried.trial_rules[r : r_last + 1]
            if step < tried.figures[1] - TINY:
                tried.figures[1] = step
                tried.best_orders[:] = tried.trial_orders
                tried.best_rules[:] = tried.trial_rules
        else:
            tried.trial_orders[r : r_last + 1] = tried.orders[r : r_last + 1]
            tried.trial_rules[r : r_last + 1] = tried.rules[r : r_last + 1]
    return bool(tried.figures[1] <= cooling.goal)


def seed_random(seed: int) -> None:
    """Seed the random numbers of the kernels."""
    np.random.seed(seed)


KERNELS = [
    run,
    _send,
    list_orders,
    _shift,
    _return_to,
    _count_up,
    _change_rules,
    _change_orders,
    _run_suffix,
    anneal,
    seed_random,
]
