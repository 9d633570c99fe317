"""A lower bound of the step over all plans with one stage a device, any replicas, and any order of work.

The problem. Stage s runs on r devices. A microbatch takes F on one of them forward, I for the gradients of the stage's
inputs, and W for the gradients of its weights; F and I contain the transfers over the stage's cuts. F waits for F of
the stage before, I for its own F and for I of the stage after, W for its own I. A backward in one piece is an I with
its W right after it. Replica j takes the microbatches j, j + r, j + 2 r, ...; the order of all actions of a device is
free. After all W the replicas sum their gradients, in D. The step ends with the last action. All times of a stage
follow from r and the ideals J and E that it lies between (see prices.py).

Labels. The chain of stages is built from the first one on. What the stages so far mean for the later ones is a label of
three kinds of figures at the boundary after them, each a lower bound for every order of work:

- Q_i: the time at which i + 1 forwards have crossed the boundary
- Z_j: the time from when j + 1 gradients have crossed it back, to the end of the step
- Y: if F + I of all later stages are added, a bound of the step

At the first boundary all of them are zero. Let m_s = ceil(m / r): some replica has at least m_s microbatches.

*Q passes a stage*: Q_i' = max over a <= i of Q_a + ceil((i + 1 - a) / r) F. Before Q_a at most a forwards have crossed,
so of i + 1 forwards that the stage has done, at least i + 1 - a began at Q_a or later, and one replica did at least
their r-th part one after the other.

*Z passes a stage*: Z_j' = max(ceil((m - j) / r) (I + W) + D, max over a >= j of ceil((a + 1 - j) / r) I + Z_a). At
the moment t when j + 1 gradients have come back, at most j input gradients of the stage have begun. So m - j begin at t
or later, each with its W after it, and D comes last. And when a + 1 are done, a + 1 - j of them have begun at t or
later; from then on Z_a is left.

*Y passes a stage*: Y' is the largest of

- Y + F + I: this stage is now one of the stages before
- Q_0 + F + m_s (I + W) + D and Q_0 + F + m_s I + Z_(m-1): the first I of a replica waits for a forward of this stage,
  and for F and I of its microbatch in all later stages
- Q_0 + m_s F + I + max(Z_(m-1), W + D): the last F of a replica ends after m_s F; its microbatch then takes F and I of
  all later stages and I of this one, and the rest of the step comes after that
- Q_(e-1) + F + m_s (I + W) + D, if e replicas have m_s microbatches: their first forwards are of e microbatches, so the
  last of these replicas begins when e forwards have crossed, or later

*The step* is at least each of: Q_0 + m_s (F + I + W) + D, the same with Q_(e-1), Q_0 + m_s (F + I) + Z_(m-1), Y' + the
F + I of later stages, and the *interval bound*: actions that begin at `rho` or later, and end `tau` or more before the
end of the step, are work of r devices in T - tau - rho; so T >= rho + work / r + tau (the bound of one machine with
heads and tails: Carlier and Pinson 1989). The heads count: at most a forwards begin before Q_a, and at most a input
gradients before Q_a + F + R, with R = F + I of later stages. So do the tails: at least j + 1 input gradients end Z_j
before the end of the step, and their forwards R + I + Z_j. At least (j + 1) - a actions of a kind are in both, if at
most a begin before rho and at least j + 1 end tau before the end. W begin after their I, and have D after them.

The search. Every test grows with F, I, W, D and with every figure of the label, so a label that is nowhere smaller than
another one of the same ideal and number of devices can be left out (a shortest path with several resources: Desrochers
and Soumis 1988). `test_line` sweeps the ideals in order and keeps the labels that pass all tests at a threshold T. If
none arrives at the full graph, no plan has a step of T or less. Bisection finds such a T. Q and Z are kept for a sample
of at most MOST_SAMPLES numbers of microbatches, and a full list of labels is merged: both only lower the bound.

*Too many ideals.* Ideals are sorted into levels of work. A stage from one level to a later one takes at least the
difference between the least of that level and the most of this one, in F, I, W and D; each cut sends at least the least
of its level. A stage inside of a level is left out, which leaves a label as it is: passing a stage makes no figure
smaller, and takes devices. So the same tests on levels are a relaxation.

*Memory.* A stage is left out if one microbatch and the weights exceed its device. Recomputing only makes I longer, and
holds one microbatch too while it runs again: the bound without it is below every plan with it.

A sum such as "F + I of the stages before + m (F + I + W) of this one" is no bound if W can wait: with F = 1, 1, I = 5,
1, W = 0, 10 and 4 microbatches it is 54 ms, and there is an order of 49 ms.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fxsplit.planner.step.kernels import bound as kernels
from fxsplit.planner.step.kernels.arrays import Ints, Levels, Prices
from fxsplit.planner.step.kernels.bound import Labels

MOST_SAMPLES, MOST_LABELS = 8, 24
"""How many numbers of microbatches a label has figures for, and how many labels an ideal and number of devices has."""
NEAR = 2e-4
"""Bisection ends at this relative width."""
ROUNDING = 1e-9
"""The tests add up times in another order than a simulation does: a bound is lowered by this share."""


class Stage(NamedTuple):
    """A stage of a chain: the nodes that ideal `end` has and ideal `begin` has not, on a number of devices.

    A stage that recomputes keeps no activations, and runs its forward again.
    """

    begin: int
    end: int
    replicas: int
    recompute: bool = False


Line = tuple[Stage, ...]
"""A chain of stages from the empty ideal to the full one, each on devices of its own."""


class LineBound:
    """The threshold test over all lines of up to `devices` devices, with at most `most_replicas` for a stage.

    With Levels in place of Prices it is the test of too many ideals, which meets no lines.
    """

    def __init__(
        self,
        prices: Prices | Levels,
        devices: int,
        m: int,
        most_replicas: int,
        most_labels: int = MOST_LABELS,
        most_samples: int = MOST_SAMPLES,
    ) -> None:
        self._prices = prices
        self._given = devices, m, min(most_replicas, devices, m)
        self._samples = sample(m, most_samples)
        shape = devices + 1, prices.value.size
        self._labels = Labels(
            np.zeros((*shape, most_labels, 1 + 2 * self._samples.size)),
            np.zeros(shape, np.int64),
            np.zeros((*shape, most_labels, 4), np.int64),
        )

    def test(self, threshold: float) -> bool:
        """Return whether some line may have a step of at most `threshold` ms."""
        if isinstance(self._prices, Levels):
            return kernels.test_levels(threshold, *self._given, self._prices, self._samples, self._labels)
        return kernels.test_line(threshold, *self._given, self._prices, self._samples, self._labels)

    def lines(self) -> list[Line]:
        """Return the lines of the labels that passed the last test; none of levels."""
        if isinstance(self._prices, Levels):
            return []
        counts, origins = self._labels.counts, self._labels.origins
        full, found = counts.shape[1] - 1, []
        for used in range(1, len(counts)):
            for place in range(int(counts[used, full])):
                line: list[Stage] = []
                end, devices, at = full, used, place
                while end:
                    begin, before, at_before, replicas = map(int, origins[devices, end, at])
                    line.append(Stage(begin, end, replicas))
                    end, devices, at = begin, before, at_before
                found.append(tuple(reversed(line)))
        return found

    def bisect(self, low: float, step: float, near: float = NEAR) -> tuple[float, list[Line]]:
        """Return a lower bound of the step of every line, in ms, and the lines met on the way, each once.

        `low` is a lower bound too, and `step` the step of a known line, in ms. If no line can be better than the known
        one, the bound is `step`. The bisection also ends if the bound is nearly zero, compared with `step` and with 1
        ms.
        """
        met: dict[Line, None] = {}
        high = step * (1 - ROUNDING)
        if low >= high or not self.test(high):
            return step, []
        met.update(dict.fromkeys(self.lines()))
        nothing = max(min(step, 1.0) * ROUNDING, float(np.finfo(float).tiny))
        while high > max(low * (1 + near), nothing):
            # Two roots, since a product of small times may be zero.
            middle = low**0.5 * high**0.5 if low > 0 else high / 2
            if self.test(middle):
                high = middle
                met.update(dict.fromkeys(self.lines()))
            else:
                low = middle
        return low * (1 - ROUNDING), [*met]


def sample(m: int, most: int = MOST_SAMPLES) -> Ints:
    """Return at most `most` of the numbers 0 to m - 1, the first and the last among them."""
    return np.unique(np.round(np.linspace(0, m - 1, min(m, most))).astype(np.int64))


def bound_by_work(prices: Prices, devices: int, m: int) -> float:
    """Return a step in ms that no plan of any kind beats: all work of m microbatches, shared evenly."""
    work = prices.forward[-1] + prices.input[-1] + prices.weight[-1]
    return m * float(work) / devices * (1 - ROUNDING)
