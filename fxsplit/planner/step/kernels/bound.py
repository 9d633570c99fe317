"""Test whether a step can be as short as a threshold, with one stage a device; see step/bound.py for the proof.

The label of a boundary is an array: Y, then Z of each sample, then Q of each sample.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fxsplit.planner.step.kernels.arrays import Floats, Ints, Levels, Prices

TINY = 1e-13
"""Times that differ by this share of the threshold count as equal: they are sums in another order."""


class Labels(NamedTuple):
    """The labels of each boundary, by the number of devices before it and the ideal.

    - `figures`: [devices + 1, ideals, list, figures]
    - `counts`: [devices + 1, ideals], how many are in use
    - `origins`: [devices + 1, ideals, list, 4]: ideal, devices and place in the list of the label before the stage, and
      the replicas of the stage
    """

    figures: Floats
    counts: Ints
    origins: Ints


class Room(NamedTuple):
    """Room for the figures of one stage: `heads` and `tails` [kinds, samples], `each` and `late` [kinds]."""

    heads: Floats
    tails: Floats
    each: Floats
    late: Floats


class Extension(NamedTuple):
    """A stage that may come after a label, from the ideal `begin` to `end`; times in ms.

    `used` devices come before it, `replicas` are its own, and `left` come after it. It takes `forward`, `input` and
    `weight` for F, I and W, `reduce` for REDUCE, and `work` in all. `rest` is the F and I of all later stages at least,
    and `whole` their work.
    """

    begin: int
    end: int
    used: int
    replicas: int
    left: int
    forward: float
    input: float
    weight: float
    reduce: float
    work: float
    rest: float
    whole: float


def add_label(figures: Floats, origins: Ints, count: int, label: Floats, origin: Ints, tiny: float) -> int:
    """Add a label to a list unless another one is at least as good; return how many labels the list has then.

    In a full list, the nearest label becomes the smaller of both in each figure: that only lowers the bound.
    """
    size = label.size
    for i in range(count):
        better = True
        for x in range(size):
            if figures[i, x] > label[x] + tiny:
                better = False
                break
        if better:
            return count
    kept = 0
    for i in range(count):
        worse = True
        for x in range(size):
            if label[x] > figures[i, x]:
                worse = False
                break
        if not worse:
            if kept != i:
                figures[kept] = figures[i]
                origins[kept] = origins[i]
            kept += 1
    if kept < figures.shape[0]:
        figures[kept] = label
        origins[kept] = origin
        return kept + 1
    nearest, least = 0, np.inf
    for i in range(kept):
        distance = 0.0
        for x in range(size):
            distance += abs(figures[i, x] - label[x])
        if distance < least:
            nearest, least = i, distance
    for x in range(size):
        figures[nearest, x] = min(figures[nearest, x], label[x])
    return kept


def bound_device(room: Room, samples: Ints, m: int, replicas: int, last: float, threshold: float) -> float:
    """Return the interval bound of one stage's devices, in ms, or the first value above the threshold.

    Kind x takes room.each[x] ms, and a weight gradient after it room.late[x]. At most samples[i] actions of a kind
    begin before heads[x, i], and at least samples[i] + 1 end before tails[x, i] ms are left. `last` comes after all.
    """
    kinds, n = room.heads.shape
    best, tiny = 0.0, TINY * threshold
    begun = np.zeros(kinds, np.int64)
    for x in range(kinds):
        for i in range(n):
            head = room.heads[x, i]
            if i and head <= room.heads[x, i - 1]:
                continue
            work = 0.0
            for y in range(kinds):
                begun[y] = m
                for a in range(n):
                    if room.heads[y, a] >= head - tiny:
                        begun[y] = samples[a]
                        break
                work += (m - begun[y]) * (room.each[y] + room.late[y])
            best = max(best, float(head + work / replicas + last))
            if best > threshold:
                return best
            for y in range(kinds):
                for b in range(n):
                    tail = room.tails[y, b]
                    if b + 1 < n and room.tails[y, b + 1] >= tail:
                        continue
                    work = 0.0
                    some = False
                    for z in range(kinds):
                        for c in range(n - 1, -1, -1):
                            if room.tails[z, c] >= tail - tiny:
                                if samples[c] + 1 > begun[z]:
                                    work += (samples[c] + 1 - begun[z]) * room.each[z]
                                    some = True
                                break
                    if some:
                        best = max(best, float(head + work / replicas + tail))
                        if best > threshold:
                            return best
    return best


def pass_stage(
    label: Floats,
    after: Floats,
    samples: Ints,
    m: int,
    r: int,
    f: float,
    i: float,
    w: float,
    d: float,
    rest: float,
    threshold: float,
    room: Room,
) -> float:
    """Write the label after a stage into `after`; return a bound of the step, in ms.

    Stops at the first bound above the threshold, without a label. `label` is that before the stage, which has r
    replicas and takes f, i and w ms for F, I and W, and d ms for REDUCE. `rest`: the F and I of all later stages at
    least, in ms.
    """
    n = samples.size
    most = (m + r - 1) // r
    y, z, q = label[0], label[n], label[1 + n]
    bound = float(max(q + most * (f + i + w) + d, q + most * (f + i) + z))
    way = max(y + f + i, q + f + most * (i + w) + d, q + f + most * i + z)
    way = max(way, q + most * f + i + max(z, w + d))
    # How many replicas have `most` microbatches.
    full = m - (most - 1) * r
    for x in range(n):
        if samples[x] <= full - 1:
            bound = max(bound, float(label[1 + n + x] + most * (f + i + w) + d))
            way = max(way, label[1 + n + x] + f + most * (i + w) + d)
    bound = max(bound, float(way + rest))
    if bound > threshold:
        return bound
    for x in range(n):
        room.heads[0, x] = label[1 + n + x]
        room.heads[1, x] = label[1 + n + x] + f + rest
        room.tails[1, x] = label[1 + x]
        room.tails[0, x] = rest + i + label[1 + x]
    room.each[0], room.each[1], room.late[0], room.late[1] = f, i, 0.0, w
    bound = max(bound, bound_device(room, samples, m, r, d, threshold))
    if bound > threshold:
        return bound
    after[0] = way
    for x in range(n):
        tail = (m - samples[x] + r - 1) // r * (i + w) + d
        for a in range(x, n):
            tail = max(tail, (samples[a] - samples[x] + r) // r * i + label[1 + a])
        after[1 + x] = tail
        head = 0.0
        for a in range(x + 1):
            head = max(head, label[1 + n + a] + (samples[x] - samples[a] + r) // r * f)
        after[1 + n + x] = head
    return bound


def extend_labels(
    labels: Labels,
    stage: Extension,
    samples: Ints,
    m: int,
    threshold: float,
    after: Floats,
    origin: Ints,
    room: Room,
) -> None:
    """Add to `labels` those after one more stage that pass all tests at the threshold, in ms.

    `after`, `origin` and `room` are only room to write in.
    """
    begin, end, used, r, left, f, i, w, d, work, rest, whole = stage
    head, full = 1 + samples.size, labels.figures.shape[1] - 1
    origin[0], origin[1], origin[3] = begin, used, r
    for at in range(labels.counts[used, begin]):
        label = labels.figures[used, begin, at]
        if label[head] + work > threshold:
            continue
        # All later work begins after the first forward of this stage, on the devices that are left.
        if end < full and label[head] + f + m * whole / left > threshold:
            continue
        if pass_stage(label, after, samples, m, r, f, i, w, d, rest, threshold, room) > threshold:
            continue
        origin[2] = at
        labels.counts[used + r, end] = add_label(
            labels.figures[used + r, end],
            labels.origins[used + r, end],
            labels.counts[used + r, end],
            after,
            origin,
            TINY * threshold,
        )


def test_line(
    threshold: float, devices: int, m: int, most_replicas: int, prices: Prices, samples: Ints, labels: Labels
) -> bool:
    """Return whether a chain of stages passes all tests at a threshold, in ms; `labels` get the labels that do."""
    n, full = prices.forward.size, prices.forward.size - 1
    labels.counts[:] = 0
    labels.figures[0, 0, 0, :] = 0.0
    labels.counts[0, 0] = 1
    after, origin = np.zeros(1 + 2 * samples.size), np.zeros(4, np.int64)
    room = Room(np.zeros((2, samples.size)), np.zeros((2, samples.size)), np.zeros(2), np.zeros(2))
    for begin in range(full):
        for used in range(devices):
            if labels.counts[used, begin] == 0:
                continue
            for end in range(begin + 1, n):
                if not prices.nested[begin, end]:
                    continue
                # A stage holds at least one microbatch.
                least = prices.held[end] - prices.held[begin] + prices.kept[end] - prices.kept[begin]
                if least + prices.taken[begin] > prices.capacity * (1 + 1e-9):
                    continue
                w = prices.weight[end] - prices.weight[begin]
                # The next stage pays for the cut at least once.
                rest = prices.forward[full] - prices.forward[end] + prices.input[full] - prices.input[end]
                rest += prices.value[end] + prices.gradient[end]
                whole = rest + prices.weight[full] - prices.weight[end]
                for r in range(1, min(most_replicas, devices - used) + 1):
                    left = devices - used - r
                    if end < full and left == 0:
                        break
                    f = prices.forward[end] - prices.forward[begin] + r * (prices.value[begin] + prices.value[end])
                    i = prices.input[end] - prices.input[begin] + r * (prices.gradient[begin] + prices.gradient[end])
                    d = (prices.reduce[end] - prices.reduce[begin]) * 4.0 * (r - 1) / r
                    work = (m + r - 1) // r * (f + i + w) + d
                    if work > threshold:
                        continue
                    stage = Extension(begin, end, used, r, left, f, i, w, d, work, rest, whole)
                    extend_labels(labels, stage, samples, m, threshold, after, origin, room)
    return bool(labels.counts[:, full].max() > 0)


def test_levels(
    threshold: float, devices: int, m: int, most_replicas: int, levels: Levels, samples: Ints, labels: Labels
) -> bool:
    """Return whether a chain of levels passes all tests at a threshold, in ms: if none does, no chain of ideals does.

    It is `test_line` with the least time that a stage between two levels may take.
    """
    n, full = levels.value.size, levels.value.size - 1
    labels.counts[:] = 0
    labels.figures[0, 0, 0, :] = 0.0
    labels.counts[0, 0] = 1
    after, origin = np.zeros(1 + 2 * samples.size), np.zeros(4, np.int64)
    room = Room(np.zeros((2, samples.size)), np.zeros((2, samples.size)), np.zeros(2), np.zeros(2))
    least = np.zeros(5)
    for begin in range(full):
        for used in range(devices):
            if labels.counts[used, begin] == 0:
                continue
            for end in range(begin + 1, n):
                for x in range(5):
                    least[x] = max(0.0, levels.least[end, x] - levels.most[begin, x])
                # The sum of F, I and W is known better than its parts.
                more = max(0.0, least[4] - least[0] - least[1] - least[2])
                crossing = levels.value[end] + levels.gradient[end]
                rest = levels.least[full, 0] - levels.most[end, 0] + levels.least[full, 1] - levels.most[end, 1]
                rest = max(0.0, rest) + crossing
                whole = levels.least[full, 4] - levels.most[end, 4] + crossing
                for r in range(1, min(most_replicas, devices - used) + 1):
                    left = devices - used - r
                    if end < full and left == 0:
                        break
                    f = least[0] + r * (levels.value[begin] + levels.value[end])
                    i = least[1] + r * (levels.gradient[begin] + levels.gradient[end])
                    d = least[3] * 4.0 * (r - 1) / r
                    work = (m + r - 1) // r * (f + i + least[2] + more) + d
                    if work > threshold:
                        continue
                    stage = Extension(begin, end, used, r, left, f, i, least[2], d, work, rest, whole)
                    extend_labels(labels, stage, samples, m, threshold, after, origin, room)
    return bool(labels.counts[:, full].max() > 0)


KERNELS = [add_label, bound_device, pass_stage, extend_labels, test_line, test_levels]
