"""Test whether a step can be as short as a threshold, with one stage a device or two.

Proofs are in step/bound.py for one stage a device, and in step/two_stages.py for two. With one stage a device the label
of a boundary is an array: Y, then Z of each sample, then Q of each sample.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fxsplit.planner.step.kernels.arrays import Between, Floats, Ints, Levels, Prices

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


class PairLabels(NamedTuple):
    """The labels of plans with two stages a device, by the ideals before the first and before or after the second one.

    - `figures`: [2, ideals, ideals, list, figures], of a device and of the next one in turn
    - `counts`: [2, ideals, ideals], how many are in use
    - `origins`: [devices, ideals, ideals, list, 4]: both ideals and the place in the list of the label before; the last
      entry is not used
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


def add_pair_label(labels: PairLabels, d: int, a: int, b: int, label: Floats, origin: Ints, tiny: float) -> None:
    """Add a label after the stages of device `d`, at the ideals `a` and `b`."""
    then = (d + 1) % 2
    labels.counts[then, a, b] = add_label(
        labels.figures[then, a, b], labels.origins[d, a, b], labels.counts[then, a, b], label, origin, tiny
    )


def test_v(threshold: float, k: int, m: int, between: Between, samples: Ints, labels: PairLabels) -> bool:
    """Return whether a chain of 2 k stages down k devices and back passes all tests at a threshold, in ms.

    The label of the ideals around the stages that are left has two sums, and then for each sample Q, Z, L and B; see
    step/two_stages.py.
    """
    n, q = between.value.size, samples.size
    full = n - 1
    forward, input_, weight = between.forward, between.input, between.weight
    value, gradient = between.value, between.gradient
    allowed, nested = between.allowed, between.nested
    labels.counts[:] = 0
    labels.figures[0, 0, full, 0, :] = 0.0
    labels.counts[0, 0, full] = 1
    # The labels have room for those of a loop.
    after, origin = np.zeros(labels.figures.shape[4]), np.zeros(4, np.int64)
    room = Room(np.zeros((4, q)), np.zeros((4, q)), np.zeros(4), np.zeros(4))
    iq, iz, il, ip = 2, 2 + q, 2 + 2 * q, 2 + 3 * q
    for d in range(k):
        now, then = d % 2, (d + 1) % 2
        labels.counts[then] = 0
        last, left, some = d == k - 1, k - d - 1, False
        # Nothing is sent between the two stages of the last device.
        inside = 0.0 if last else 1.0
        for lo in range(n):
            for hi in range(lo, n):
                count = labels.counts[now, lo, hi]
                if count == 0:
                    continue
                soonest = np.inf
                for at in range(count):
                    soonest = min(soonest, labels.figures[now, lo, hi, at, iq])
                for a in range(lo + 1, hi):
                    if not allowed[lo, a] or not nested[a, hi]:
                        continue
                    fa = forward[lo, a] + value[lo] + inside * value[a]
                    ia = input_[lo, a] + gradient[lo] + inside * gradient[a]
                    wa = weight[lo, a]
                    if soonest + m * (fa + ia + wa) > threshold:
                        continue
                    for b in range(a if last else a + 1, a + 1 if last else hi):
                        if not nested[a, b] or not allowed[b, hi]:
                            continue
                        fb = forward[b, hi] + inside * value[b] + value[hi]
                        ib = input_[b, hi] + inside * gradient[b] + gradient[hi]
                        wb = weight[b, hi]
                        work = m * (fa + ia + wa + fb + ib + wb)
                        if soonest + work > threshold:
                            continue
                        rest_f = rest_i = rest = 0.0
                        if not last:
                            rest_f = forward[a, b] + value[a] + value[b]
                            rest_i = input_[a, b] + gradient[a] + gradient[b]
                            rest = m * (rest_f + rest_i + weight[a, b]) / left
                        late = m * (ia + wa + ib + wb)
                        most = max(max(fa, fb), max(ia, ib))
                        for at in range(count):
                            u = labels.figures[now, lo, hi, at]
                            head, tail, back = u[iq], u[iz + q - 1], u[ip]
                            if head + work > threshold or head + m * (fa + fb + ia + ib) + tail > threshold:
                                continue
                            begun = head + fa
                            if begun + rest > threshold:
                                continue
                            down = max(u[0] + fa + fb, begun + m * fb + late, begun + fb + back + late)
                            down = max(
                                down, begun + m * (fb + ib + ia) + tail, begun + fb + back + m * (ia + ib) + tail
                            )
                            if down + rest_f > threshold:
                                continue
                            out = begun + fb + back + ib
                            way = max(u[1] + fa + ia + fb + ib, out + m * (ia + wa), out + m * ia + tail)
                            way = max(way, out + ia + max(tail, wa) + (m - 1) * most)
                            if way + rest_f + rest_i > threshold:
                                continue
                            for x in range(q):
                                room.heads[0, x] = u[iq + x]
                                room.heads[1, x] = u[iq + x] + fa + rest_f
                                room.heads[2, x] = max(room.heads[1, x] + fb + back, room.heads[1, 0] + fb + u[ip + x])
                                room.heads[3, x] = room.heads[2, x] + ib + rest_i
                                room.tails[3, x] = u[iz + x]
                                room.tails[2, x] = rest_i + ia + u[iz + x]
                                room.tails[1, x] = max(u[il + x], back + ib + room.tails[2, x])
                                room.tails[0, x] = rest_f + fb + room.tails[1, x]
                            room.each[0], room.each[1], room.each[2], room.each[3] = fa, fb, ib, ia
                            room.late[2], room.late[3] = wb, wa
                            if bound_device(room, samples, m, 1, 0.0, threshold) > threshold:
                                continue
                            after[0], after[1] = down, way
                            for x in range(q):
                                crossed = returned = 0.0
                                for y in range(x + 1):
                                    more = samples[x] - samples[y] + 1
                                    crossed = max(crossed, u[iq + y] + more * fa)
                                    returned = max(returned, fb + u[ip + y] + more * ib)
                                end, leave = (m - samples[x]) * (ia + wa), (m - samples[x]) * (fb + ib + wb + ia + wa)
                                for y in range(x, q):
                                    more = samples[y] - samples[x] + 1
                                    end = max(end, more * ia + u[iz + y])
                                    leave = max(leave, more * fb + room.tails[1, y])
                                after[iq + x], after[iz + x], after[il + x] = crossed, end, leave
                                after[ip + x] = max(returned, (samples[x] + 1) * (fb + ib))
                            origin[0], origin[1], origin[2] = lo, hi, at
                            add_pair_label(labels, d, a, b, after, origin, TINY * threshold)
                            some = True
        if not some:
            return False
    return True


def test_loop(
    threshold: float, k: int, m: int, middle: int, between: Between, samples: Ints, labels: PairLabels
) -> bool:
    """Return whether a chain of 2 k stages twice down k devices passes all tests at a threshold, in ms.

    The first k stages end at the ideal `middle`. A label has three sums, the F and the I of second stages so far, and
    then for each sample Q, Z, and Q and Z of the second stage's boundary; see step/two_stages.py.
    """
    n, q = between.value.size, samples.size
    full = n - 1
    forward, input_, weight = between.forward, between.input, between.weight
    value, gradient = between.value, between.gradient
    allowed, nested = between.allowed, between.nested
    iq, iz, ip, iy = 5, 5 + q, 5 + 2 * q, 5 + 3 * q
    labels.counts[:] = 0
    labels.figures[0, 0, middle, 0, :] = 0.0
    labels.figures[0, 0, middle, 0, ip : ip + q] = forward[0, middle]
    labels.figures[0, 0, middle, 0, iy : iy + q] = input_[0, middle]
    labels.counts[0, 0, middle] = 1
    after, origin = np.zeros(5 + 4 * q), np.zeros(4, np.int64)
    room = Room(np.zeros((4, q)), np.zeros((4, q)), np.zeros(4), np.zeros(4))
    for d in range(k):
        now, then = d % 2, (d + 1) % 2
        labels.counts[then] = 0
        last, left, some = d == k - 1, k - d - 1, False
        for lo in range(middle):
            for hi in range(middle, full):
                count = labels.counts[now, lo, hi]
                if count == 0:
                    continue
                soonest = np.inf
                for at in range(count):
                    soonest = min(soonest, labels.figures[now, lo, hi, at, iq])
                for a in range(lo + 1, middle + 1):
                    if (a == middle) != last or not allowed[lo, a] or not nested[a, middle]:
                        continue
                    fa = forward[lo, a] + value[lo] + value[a]
                    ia = input_[lo, a] + gradient[lo] + gradient[a]
                    wa = weight[lo, a]
                    if soonest + m * (fa + ia + wa) > threshold:
                        continue
                    for b in range(hi + 1, n):
                        if (b == full) != last or not allowed[hi, b]:
                            continue
                        fb = forward[hi, b] + value[hi] + value[b]
                        ib = input_[hi, b] + gradient[hi] + gradient[b]
                        wb = weight[hi, b]
                        work = m * (fa + ia + wa + fb + ib + wb)
                        if soonest + work > threshold:
                            continue
                        one_f = one_i = two_f = two_i = rest = 0.0
                        if not last:
                            one_f = forward[a, middle] + value[a] + value[middle]
                            one_i = input_[a, middle] + gradient[a] + gradient[middle]
                            two_f = forward[b, full] + value[b]
                            two_i = input_[b, full] + gradient[b]
                            rest = m * (one_f + one_i + two_f + two_i + weight[a, middle] + weight[b, full]) / left
                        late = m * (ia + wa + ib + wb)
                        most = max(max(fa, fb), max(ia, ib))
                        for at in range(count):
                            u = labels.figures[now, lo, hi, at]
                            head, tail, second_f, second_i = u[iq], u[iz + q - 1], u[3], u[4]
                            if head + work > threshold or head + m * (fa + fb + ia + ib) + tail > threshold:
                                continue
                            begun = head + fa
                            if begun + rest > threshold:
                                continue
                            reached = begun + second_f
                            down = max(u[0] + fa, reached + m * fb + late, reached + m * (fb + ia + ib) + tail)
                            if down + one_f > threshold:
                                continue
                            turn = max(u[1] + fa + fb + ib, reached + fb + late, reached + fb + m * (ia + ib) + tail)
                            if turn + one_f + two_f + two_i > threshold:
                                continue
                            out = reached + fb + ib + second_i
                            way = max(u[2] + fa + ia + fb + ib, out + m * (ia + wa), out + m * ia + tail)
                            way = max(way, out + ia + max(tail, wa) + (m - 1) * most)
                            if way + one_f + one_i + two_f + two_i > threshold:
                                continue
                            for x in range(q):
                                room.heads[0, x] = u[iq + x]
                                room.heads[1, x] = max(u[ip + x], u[iq + x] + fa + one_f + second_f)
                                room.heads[2, x] = room.heads[1, x] + fb + two_f + two_i
                                room.heads[3, x] = room.heads[2, x] + ib + second_i + one_i
                                room.tails[3, x] = u[iz + x]
                                room.tails[2, x] = max(u[iy + x], second_i + one_i + ia + u[iz + x])
                                room.tails[1, x] = two_f + two_i + ib + room.tails[2, x]
                                room.tails[0, x] = one_f + second_f + fb + room.tails[1, x]
                            room.each[0], room.each[1], room.each[2], room.each[3] = fa, fb, ib, ia
                            room.late[2], room.late[3] = wb, wa
                            if bound_device(room, samples, m, 1, 0.0, threshold) > threshold:
                                continue
                            after[0], after[1], after[2] = down, turn, way
                            after[3], after[4] = second_f + fb, second_i + ib
                            for x in range(q):
                                crossed = again = 0.0
                                for y in range(x + 1):
                                    more = samples[x] - samples[y] + 1
                                    crossed = max(crossed, u[iq + y] + more * fa)
                                    again = max(again, room.heads[1, y] + more * fb)
                                end, leave = (m - samples[x]) * (ia + wa), (m - samples[x]) * (ib + wb + ia + wa)
                                for y in range(x, q):
                                    more = samples[y] - samples[x] + 1
                                    end = max(end, more * ia + u[iz + y])
                                    leave = max(leave, more * ib + room.tails[2, y])
                                after[iq + x], after[iz + x], after[ip + x], after[iy + x] = crossed, end, again, leave
                            origin[0], origin[1], origin[2] = lo, hi, at
                            add_pair_label(labels, d, a, b, after, origin, TINY * threshold)
                            some = True
        if not some:
            return False
    return True


KERNELS = [
    add_label,
    bound_device,
    pass_stage,
    extend_labels,
    test_line,
    test_levels,
    add_pair_label,
    test_v,
    test_loop,
]
