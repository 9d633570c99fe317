"""A lower bound of the step over all plans with two stages on each of their devices, and any order of work.

The problem. Device d of k has two stages, a = d and b. In a *loop* b = d + k: the stages go twice down the line of
devices. In a *V* b = 2 k - 1 - d: they go down and back, and nothing is sent between the two stages of the last device.
Stages have no replicas. Otherwise everything is as in bound.py: F, I and W of a stage follow from the ideals that it
lies between, and the order of all actions of a device is free. Each stage has a node that takes time or has parameters:
so joining costless nodes, which never makes a cut more expensive, leaves no stage empty.

*Sums* (kernels/sums.py). No order of work beats the following sums for a device with stages a and b. Each has F, I and
W of stages once or m times; the first action of a kind has a way of one microbatch before it, and the last one a way
after it:

- F of the stages before a, and m (F + I + W) of a and b
- F of the stages before b, and m F of b, m (I + W) of a and b: before the first F of b a device only has F of a
- F of all stages, I of the stages after b, and m (I + W) of a and b: before its first I a device only has F
- F of all stages, I of the stages after a, and m (I + W) of a
- the first three with, in place of W, I of the stages before a and then W of stage 0: of the actions F and I of a
  device the last one is an I of a
- F and I of all stages and W of stage 0, with m F, or m I, of one stage

So a mean of such sums, with any shares, is a bound too. It is a sum over the stages, and a shortest path finds the
chain with the least one. Multiplicative weights look for the shares with the largest bound (a Lagrangian dual: Held and
Karp 1971). Its price is that the least of the means may be less than the least of the largest sums.

*Pairs* (kernels/bound.py). A label holds lower bounds of figures at the boundaries around the devices that are left, as
in bound.py. The stages a and b of a device are added together: in a V from the outside to the inside, and in a loop,
for each ideal in the middle, both halves in step. For the samples of numbers of microbatches:

- Q_j: the time at which j + 1 F have crossed into a; Z_j: the time from when j + 1 I have crossed back from a, to the
  end. They pass a stage as in bound.py, with r = 1
- in a V, L_j: the time from when j + 1 F have left b, to the end; B_j: the time from when the first F has left b, until
  j + 1 I have come back to b
- in a loop, P_j: the time at which j + 1 F have crossed into b; Y_j: the time from when j + 1 I have crossed back from
  b, to the end

L_j' = max((m - j) (F_b + I_b + W_b + I_a + W_a), max over i >= j of (i + 1 - j) F_b + the time after i + 1 F_b): at
that moment at most j F of b have begun, so at least m - j microbatches have all of these actions left. B_j' = max((j +
1) (F_b + I_b), max over i <= j of F_b + B_i + (j + 1 - i) I_b). P and Y pass a stage as Q and Z do, and Y_j' is at
least (m - j) (I_b + W_b + I_a + W_a).

Further figures wait for the F, or the F and I, of stages between, as Y in bound.py: the first F of b comes after F of
all stages between a and b, the first I of b after F and I of the stages after b, and the first I of a after the I of
the stages between. What the device has left at each of these moments is in the list of sums above. Last, the interval
bound of bound.py holds for the device with four kinds of actions, F_a, F_b, I_b and I_a, whose heads and tails follow
from these figures.

*The families.* There is a bound for each k from 2 to the number of devices, as a V and as a loop: first that of the
sums, and if that is less than the best step known, that of the pairs, by tests at rising thresholds. The family with
the lowest bound is raised first. A test that fails is fast.

*Too many ideals* are sorted into levels, as in bound.py, and only the sums are used. *Memory.* Two stages share a
device evenly, so a stage is left out if one microbatch and its weights exceed half of the device.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from fxsplit.planner.step.bound import ROUNDING, sample
from fxsplit.planner.step.kernels import bound as kernels
from fxsplit.planner.step.kernels import sums
from fxsplit.planner.step.kernels.arrays import Between, Floats, Levels, Prices
from fxsplit.planner.step.kernels.bound import PairLabels
from fxsplit.schedule.schedule import Homes
from fxsplit.schedule.solver.search import Placement, place_stages

ROUNDS = 900
"""How often the shares of sums change at most."""
MOST_LABELS, MOST_SAMPLES = 8, 4
"""The labels of a pair of ideals, and the numbers of microbatches that a label has figures for."""
MOST_PAIRED = 130
"""With more ideals the tables of the pairs are too large, and the bound is that of the sums."""
NEAR, FIRST_RAISE, FASTER = 1e-3, 1e-2, 1.6
"""Tests end at this relative width. The first one is at a threshold that is higher by FIRST_RAISE, and after each that
fails the next one is higher by FASTER times as much."""
FEW_MIDDLES = 3
"""After chains through so many middles have passed a test, no other middle is looked at."""


class Chain(NamedTuple):
    """A chain of stages, two on each device: their placement, and the ideal at the end of each stage."""

    placement: Placement
    ends: tuple[int, ...]

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.ends) // 2

    @property
    def family(self) -> Family:
        """The family of the chain."""
        return self.placement, self.devices

    @property
    def homes(self) -> Homes:
        """The device of each stage."""
        return place_stages(self.devices, 2, self.placement)


PLACEMENTS: tuple[Placement, ...] = ("v", "loop")
Family = tuple[Placement, int]
"""A placement, and a number of devices."""


class ChainBound:
    """The bounds of all families with two stages a device, in ms, and the chains that come close to them.

    `bounds` are those of the families that may have a step below `goal` ms, `met` the chains that their tests met.
    """

    def __init__(self, prices: Prices | Levels, devices: int, m: int) -> None:
        self.levels = isinstance(prices, Levels)
        self.between = measure_levels(prices) if isinstance(prices, Levels) else measure_between(prices)
        self._devices, self._m = devices, m
        self._samples = sample(m, MOST_SAMPLES)
        self._middles: dict[Family, Floats] = {}
        self._labels: PairLabels | None = None
        self._passed: dict[Family, float] = {}
        self._growth: dict[Family, float] = {}
        self.bounds: dict[Family, float] = {}
        self.met: dict[Chain, None] = {}

    @property
    def is_paired(self) -> bool:
        """Whether the ideals are few enough for tests of pairs."""
        return not self.levels and self.between.value.size <= MOST_PAIRED

    def bound_by_sums(self, goal: float) -> float:
        """Find the bound of each family by sums, and the chains with the least sums; return the least bound, in ms.

        Families that cannot have a step below `goal` ms are left out.
        """
        n = self.between.value.size
        work = float(self.between.forward[0, -1] + self.between.input[0, -1] + self.between.weight[0, -1])
        for k in range(self._devices, 1, -1):
            if self._m * work / k * (1 - ROUNDING) >= goal:
                break
            for placement in PLACEMENTS:
                family = placement, k
                met, middles = np.zeros((ROUNDS, 2 * k + 1), np.int64), np.zeros(n)
                free = k if placement == "v" else -1
                rows = list_rows(placement, k, self._m)
                low, count = sums.mix_rows(self.between, rows, free, self._m, goal, ROUNDS, met, middles)
                if low * (1 - ROUNDING) < goal:
                    self.bounds[family], self._middles[family] = low * (1 - ROUNDING), middles
                    if not self.levels:
                        self._meet(placement, met[:count].tolist())
        return self.least(goal)

    def _meet(self, placement: Placement, found: list[list[int]]) -> list[Chain]:
        """Remember chains, and return them."""
        chains = [Chain(placement, tuple(ideals[1:])) for ideals in found]
        self.met.update(dict.fromkeys(chains))
        return chains

    def least(self, goal: float) -> float:
        """Return the least bound of a family, in ms; `goal` if none is less."""
        return min([goal, *self.bounds.values()])

    def bound_chain(self, chain: Chain) -> float:
        """Return a bound of the step of one chain, in ms: the largest of its sums."""
        rows = list_rows(chain.placement, chain.devices, self._m)
        return float((rows * self.price(chain)).sum(axis=(1, 2)).max())

    def price(self, chain: Chain) -> Floats:
        """Return F, I and W of each stage of a chain, [3, stages], in ms."""
        times = np.zeros((3, len(chain.ends)))
        ideals = np.array([0, *chain.ends], np.int64)
        sums.price_chain(self.between, ideals, chain.devices if chain.placement == "v" else -1, times)
        return times

    def test(self, family: Family, threshold: float) -> list[Chain] | None:
        """Return chains of a family that may have a step of at most `threshold` ms; None if no chain has."""
        placement, k = family
        n, m = self.between.value.size, self._m
        if self._labels is None:
            size = 5 + 4 * self._samples.size
            most = max(devices for _, devices in self.bounds)
            self._labels = PairLabels(
                np.zeros((2, n, n, MOST_LABELS, size)),
                np.zeros((2, n, n), np.int64),
                np.zeros((most, n, n, MOST_LABELS, 4), np.int64),
            )
        if placement == "v":
            if not kernels.test_v(threshold, k, m, self.between, self._samples, self._labels):
                return None
            return self._meet("v", [ideals for a in range(n) for ideals in self._follow(family, a, a)])
        found: list[Chain] | None = None
        for middle in range(k, n - k):
            if family in self._middles and self._middles[family][middle] > threshold:
                continue
            if kernels.test_loop(threshold, k, m, middle, self.between, self._samples, self._labels):
                found = [*(found or []), *self._meet("loop", self._follow(family, middle, n - 1))]
                if len(found) > FEW_MIDDLES:
                    break
        return found

    def _follow(self, family: Family, a: int, b: int) -> list[list[int]]:
        """Return the chains of the labels that end at two ideals, as lists of all their ideals."""
        (placement, k), labels = family, self._labels
        assert labels is not None, "a test has made them"
        found = []
        for place in range(int(labels.counts[k % 2, a, b])):
            first, second, lo, hi, at = [], [], a, b, place
            for d in range(k - 1, -1, -1):
                first.append(lo)
                second.append(hi)
                lo, hi, at = labels.origins[d, lo, hi, at, :3].tolist()
            if placement == "v":
                ideals = [0, *first[::-1], *second[1:], self.between.value.size - 1]
            else:
                ideals = [0, *first[::-1], *second[::-1]]
            # Merged labels may have an origin that was replaced.
            if all(x < y and self.between.allowed[x, y] for x, y in pairwise(ideals)):
                found.append(ideals)
        return found

    def raise_lowest(self, goal: float) -> bool:
        """Raise the lowest bound of a family by a test, to `goal` ms at most; return False if there is nothing to gain.

        The test may meet new chains.
        """
        family = min(self.bounds, key=self.bounds.__getitem__, default=None)
        if family is None or not self.is_paired:
            return False
        low, high = self.bounds[family], self._passed.get(family, inf)
        # The bound of all families is this one's.
        if low >= goal or high <= low * (1 + NEAR):
            return False
        growth = self._growth.setdefault(family, FIRST_RAISE)
        middle = min(goal, low * (1 + growth) if high == inf else (low * high) ** 0.5)
        if self.test(family, middle) is None:
            self.bounds[family] = goal if middle == goal else middle * (1 - ROUNDING)
            self._growth[family] *= FASTER
        else:
            self._passed[family] = middle
        return True

    def prove(self, step: float) -> float:
        """Return the least bound, after raising those that are close to a step in ms if no chain can be better."""
        # Tests end at a width, and only a test at the step itself closes the rest.
        close = [family for family, low in self.bounds.items() if low < step]
        if (
            close
            and not self.levels
            and self.between.value.size <= MOST_PAIRED
            and self.least(step) * (1 + NEAR) >= step
        ):
            for family in close:
                if self.test(family, step * (1 - ROUNDING)) is None:
                    self.bounds[family] = step
        return self.least(step)


@cache
def list_rows(placement: Placement, k: int, m: int) -> Floats:
    """Return the sums that bound the step of m microbatches on k devices: how often F, I and W count.

    [sums, 3, stages], see the list in this file's docstring.
    """
    stages, rows = 2 * k, []
    for a in range(k):
        b = stages - 1 - a if placement == "v" else a + k
        both, once = [a, b], np.zeros((6, 3, stages))
        once[0, 0, :a] = 1
        once[1, 0, :b] = 1
        once[2, 0] = 1
        once[2, 1, b + 1 :] = 1
        begun = [both, [b], []]
        for row, ahead in enumerate(begun):
            once[row + 3] = once[row]
            # After the last I of a come I of the stages before it, and W of stage 0.
            once[row + 3, 1, :a] += 1
            once[row + 3, 2, 0] += 1
            once[row, 2, both] = m
            for each in (row, row + 3):
                once[each, 0, ahead] = m
                once[each, 1, both] = m
        alone = np.zeros((3, stages))
        alone[0] = 1
        alone[1, a + 1 :] = 1
        alone[1:, a] = m
        rows += [*once, alone]
        for s in both:
            for action in (0, 1):
                way = np.zeros((3, stages))
                way[:2] = 1
                way[2, 0] = 1
                way[action, s] = m
                rows.append(way)
    return np.array(rows)


def measure_between(prices: Prices) -> Between:
    """Return what a stage between any two ideals takes, and which stages a half of a device may hold."""
    # A stage holds at least one microbatch.
    held = prices.held + prices.kept
    least = held[None, :] - held[:, None] + prices.taken[:, None]
    allowed = prices.nested & (least <= prices.capacity / 2 * (1 + 1e-9))
    np.fill_diagonal(allowed, False)
    forward, input_, weight = (
        np.ascontiguousarray(figure[None, :] - figure[:, None])
        for figure in (prices.forward, prices.input, prices.weight)
    )
    return Between(forward, input_, weight, prices.value, prices.gradient, prices.nested, allowed)


def measure_levels(levels: Levels) -> Between:
    """Return the least that a stage between ideals of any two levels takes; a stage may lie inside of a level."""
    n = levels.value.size
    least = np.maximum(levels.least[None, :] - levels.most[:, None], 0.0)
    nested = np.triu(np.ones((n, n), np.bool_))
    nested[0, 0] = nested[-1, -1] = False
    forward, input_, weight = (np.ascontiguousarray(least[:, :, x]) for x in range(3))
    return Between(forward, input_, weight, levels.value, levels.gradient, nested, nested)
