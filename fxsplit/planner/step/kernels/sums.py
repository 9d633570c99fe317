"""Find chains of stages with the least weighted sum of their times: the cheap bound of plans with two stages a device.

A *chain* is an array of ideals [stages + 1], from the empty one to the full one. See step/two_stages.py for the proof.
"""

from __future__ import annotations

import numpy as np

from fxsplit.planner.step.kernels.arrays import Between, Floats, Ints

FAR = 1e300
"""The sum of no chain."""


def find_cheapest(
    between: Between, factors: Floats, free: int, m: int, most: float, chain: Ints, sums: Floats, before: Ints
) -> float:
    """Write the chain with the least sum of factors [3, stages] times F, I and W of its stages; return the sum.

    A stage whose work for m microbatches is more than `most` ms is left out. Nothing is sent at the cut before the
    stage `free` (-1: there is no such cut). `sums` [stages + 1, ideals] gets the least sum of the stages before an
    ideal, and `before` is only room to write in.
    """
    stages, n = factors.shape[1], between.value.size
    forward, input_, weight = between.forward, between.input, between.weight
    value, gradient, allowed = between.value, between.gradient, between.allowed
    sums[:] = FAR
    sums[0, 0] = 0.0
    for s in range(stages):
        a, b, c = factors[0, s], factors[1, s], factors[2, s]
        here = 0.0 if s == free else 1.0
        there = 0.0 if s + 1 == free else 1.0
        for begin in range(n):
            known = sums[s, begin]
            if known >= FAR:
                continue
            for end in range(n - 1 if s + 1 == stages else begin, n):
                if not allowed[begin, end]:
                    continue
                f = forward[begin, end] + here * value[begin] + there * value[end]
                i = input_[begin, end] + here * gradient[begin] + there * gradient[end]
                w = weight[begin, end]
                if m * (f + i + w) > most:
                    continue
                found = known + a * f + b * i + c * w
                if found < sums[s + 1, end]:
                    sums[s + 1, end] = found
                    before[s + 1, end] = begin
    if sums[stages, n - 1] < FAR:
        chain[stages] = n - 1
        for s in range(stages, 0, -1):
            chain[s - 1] = before[s, chain[s]]
    return float(sums[stages, n - 1])


def find_rest(between: Between, factors: Floats, first: int, m: int, most: float) -> Floats:
    """Return the least sum of the stages from `first` on, by the ideal that this stage begins at; as in a loop."""
    stages, n = factors.shape[1], between.value.size
    sums = np.full((stages + 1, n), FAR)
    sums[stages, n - 1] = 0.0
    for s in range(stages - 1, first - 1, -1):
        a, b, c = factors[0, s], factors[1, s], factors[2, s]
        for end in range(n):
            known = sums[s + 1, end]
            if known >= FAR:
                continue
            for begin in range(end + 1):
                if not between.allowed[begin, end]:
                    continue
                f = between.forward[begin, end] + between.value[begin] + between.value[end]
                i = between.input[begin, end] + between.gradient[begin] + between.gradient[end]
                w = between.weight[begin, end]
                if m * (f + i + w) <= most:
                    sums[s, begin] = min(sums[s, begin], known + a * f + b * i + c * w)
    least: Floats = sums[first]
    return least


def price_chain(between: Between, chain: Ints, free: int, times: Floats) -> None:
    """Write F, I and W of each stage of a chain into `times` [3, stages], in ms."""
    for s in range(chain.size - 1):
        begin, end = chain[s], chain[s + 1]
        here = 0.0 if s == free else 1.0
        there = 0.0 if s + 1 == free else 1.0
        times[0, s] = between.forward[begin, end] + here * between.value[begin] + there * between.value[end]
        times[1, s] = between.input[begin, end] + here * between.gradient[begin] + there * between.gradient[end]
        times[2, s] = between.weight[begin, end]


def mix_rows(
    between: Between,
    rows: Floats,
    free: int,
    m: int,
    goal: float,
    rounds: int,
    met: Ints,
    middles: Floats,
) -> tuple[float, int]:
    """Return a bound of every chain whose step is at most `goal` ms, and how many chains are written to `met`.

    rows: [rows, 3, stages], the factors of sums that are all bounds of the step. The chain with the least mean of them
    bounds all chains. Rows that are large for this chain get more weight in the next round (multiplicative weights:
    Arora, Hazan and Kale 2012). Stops at a bound of `goal`. In a loop (`free` is -1) `middles` [ideals] get bounds of
    the chains through each middle ideal.
    """
    count, stages, n = rows.shape[0], rows.shape[2], between.value.size
    logs, shares = np.zeros(count), np.full(count, 1.0 / count)
    factors, times = np.zeros((3, stages)), np.zeros((3, stages))
    chain, sums, before = np.zeros(stages + 1, np.int64), np.zeros((stages + 1, n)), np.zeros((stages + 1, n), np.int64)
    best, found = 0.0, 0
    for turn in range(rounds):
        factors[:] = 0.0
        for row in range(count):
            # Without rows of a tiny share the sum is only smaller.
            if shares[row] > 1e-9:
                factors += shares[row] * rows[row]
        least = find_cheapest(between, factors, free, m, goal, chain, sums, before)
        if least >= FAR:
            return FAR, found
        best = max(best, least)
        if free < 0 and turn % 3 == 0:
            rest = find_rest(between, factors, stages // 2, m, goal)
            for x in range(n):
                middles[x] = max(middles[x], sums[stages // 2, x] + rest[x])
        if best >= goal:
            break
        met[found] = chain
        found += 1
        price_chain(between, chain, free, times)
        # The rate falls with the rounds.
        rate, most = 8.0 / (1.0 + 0.15 * turn), -np.inf
        for row in range(count):
            bound = (rows[row] * times).sum()
            logs[row] += rate * (bound / goal - 1.0)
            most = max(most, logs[row])
        total = 0.0
        for row in range(count):
            shares[row] = np.exp(logs[row] - most)
            total += shares[row]
        shares /= total
    return best, found


KERNELS = [find_cheapest, find_rest, price_chain, mix_rows]
