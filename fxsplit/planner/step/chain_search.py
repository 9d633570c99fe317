"""Search for chains with two stages a device and a short step, while the bound of all of them rises.

The tests of the bound meet chains that no bound excludes. List schedules judge each of them, and annealing moves the
cuts of the best. The orders of work of the most promising chains are then searched by `schedule.search`, for their
list schedules are often some percent above the best order.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from math import inf, log
from random import Random

from fxsplit.planner.step.kernels.arrays import Floats, Ints
from fxsplit.planner.step.kernels.search import Lattice
from fxsplit.planner.step.two_stages import NEAR, PLACEMENTS, Chain, ChainBound, Family
from fxsplit.schedule.generators.fill import evaluate, list_rules
from fxsplit.schedule.kernels.instance import Instance, make_instance
from fxsplit.schedule.simulation.simulate import Times
from fxsplit.schedule.solver.search import RULES, warm_up
from fxsplit.schedule.solver.starts import list_order, list_schedule_rules

TESTS_S, WALK_S = 0.8, 0.3
"""For how many seconds of processor time bounds are raised, and cuts are moved, at most."""
WALKS, STARTS, CHANGES, HEAT, USUAL_RULES = 12, 5, 150, 0.01, 3
"""How many annealings of cuts there are, from how many chains, of how many changes, and at which temperature, in steps;
and by how many list schedules a changed chain is judged."""
MOST_KNOWN, LONGER = 15, 1.02
"""How many of the chains with the least sums are judged, and how many times the best step known a bound may be."""

ListRule = tuple[tuple[int, ...], Ints, float]
"""The priorities, limits and reserve of a list schedule."""


class ChainSearch:
    """The chains known so far, `steps` with the step of each one's best list schedule in ms, and their bounds.

    `usual` are chains from elsewhere.
    """

    def __init__(self, bound: ChainBound, lattice: Lattice, m: int) -> None:
        self.bound, self._lattice, self._m = bound, lattice, m
        self.steps: dict[Chain, float] = {}
        self.usual: list[Chain] = []
        self._known: dict[Family, tuple[Instance, list[ListRule], list[Floats]]] = {}
        # How often each list schedule was the best of a chain.
        self._wins: dict[Family, Counter[int]] = {}

    @property
    def best(self) -> float:
        """The shortest step known, in ms; infinite without a chain."""
        return min(self.steps.values(), default=inf)

    def rank(self) -> list[Chain]:
        """Return the known chains, the best first."""
        return sorted(self.steps, key=self.steps.__getitem__)

    def run(self, step: float, deadline: float = inf) -> None:
        """Raise the bounds up to a known step in ms, and find chains; stops at the deadline, of time.monotonic()."""
        if self.bound.levels or self.bound.least(step) >= step:
            return
        warm_up()
        for placement in PLACEMENTS:
            # Compile the tests before the clock starts.
            self.bound.test((placement, 2), 0.0)
        known = sorted(self.bound.met, key=self.bound.bound_chain)[:MOST_KNOWN]
        seen = len(self.bound.met)
        for chain in [*known, *self.usual]:
            self.add(chain, LONGER * step)
        end = time.thread_time() + TESTS_S
        while (
            time.thread_time() < end and time.monotonic() < deadline and self.bound.raise_lowest(min(step, self.best))
        ):
            for chain in islice(self.bound.met, seen, None):
                self.add(chain, LONGER * step)
            seen = len(self.bound.met)
        self._move_cuts(deadline, step)

    def add(self, chain: Chain, limit: float = inf) -> None:
        """Judge a chain by list schedules, unless it is known or cannot have a step below `limit` ms."""
        if chain not in self.steps and self.bound.bound_chain(chain) < limit:
            self.steps[chain] = self._judge(chain)

    def _judge(self, chain: Chain, rules: Iterable[int] | None = None) -> float:
        """Return the step of a chain's best list schedule, in ms: of those with the given numbers, or of all."""
        forward, input_, weight = self.bound.price(chain)
        one, listed, gaps = self._prepare(chain)
        one = one._replace(forward=forward, input=input_, weight=weight)
        best, winner = inf, 0
        for number in range(len(listed)) if rules is None else rules:
            order = list_order(one, *listed[number])
            if order is None:
                continue
            for gap in gaps:
                step, _ = evaluate(one, order, gap)
                if step < best:
                    best, winner = step, number
        self._wins.setdefault(chain.family, Counter())[winner] += 1
        return best

    def _prepare(self, chain: Chain) -> tuple[Instance, list[ListRule], list[Floats]]:
        """Return the instance of a chain without its times, the rules of list schedules, and those of gaps."""
        family = chain.family
        if family not in self._known:
            one = make_instance(chain.homes, self._m, Times.unit(len(chain.ends)))
            self._known[family] = one, [*list_schedule_rules(one)], [*list_rules(one, RULES)]
        return self._known[family]

    def _move_cuts(self, deadline: float, goal: float) -> None:
        """Anneal the cuts of the best chains in turn, for WALK_S or until the deadline, of time.monotonic()."""
        end = time.thread_time() + WALK_S
        for turn in range(WALKS):
            if not self.steps or self.best <= self.bound.least(goal) * (1 + NEAR):
                break
            if time.thread_time() > end or time.monotonic() > deadline:
                break
            ranked = self.rank()
            chain = ranked[turn % min(STARTS, len(ranked))]
            rules = [number for number, _ in self._wins[chain.family].most_common(USUAL_RULES)]
            self._anneal(chain, rules, Random(turn), end)

    def _anneal(self, chain: Chain, rules: list[int], random: Random, end: float) -> None:
        """Change the cuts of a chain at random; a change to a longer step is kept with a falling probability.

        end: the time.thread_time() at which this ends.
        """
        now, best, tried = chain, chain, dict[Chain, float]()
        step = shortest = self.steps[chain]
        for change in range(CHANGES):
            trial = self._move_cut(now, random)
            if trial is None:
                continue
            temperature = HEAT * shortest * (1 - change / CHANGES) ** 2
            limit = step - temperature * log(max(1e-12, random.random()))
            if self.bound.bound_chain(trial) >= limit:
                continue
            found = tried[trial] = tried.get(trial) or self._judge(trial, rules)
            if found <= limit:
                now, step = trial, found
                if found < shortest:
                    best, shortest = trial, found
            if time.thread_time() > end:
                break
        if best is not chain:
            self.add(best)

    def _move_cut(self, chain: Chain, random: Random) -> Chain | None:
        """Return the chain with one cut moved along the lattice, or None if no stages lie between the new cuts."""
        ideals = [0, *chain.ends]
        s = random.randrange(1, len(ideals) - 1)
        cut = ideals[s]
        while cut == ideals[s] or random.random() < 0.5:
            near = self._lattice.near[self._lattice.pointer[cut] : self._lattice.pointer[cut + 1]]
            cut = int(near[random.randrange(near.size)])
        allowed = self.bound.between.allowed
        if not (allowed[ideals[s - 1], cut] and allowed[cut, ideals[s + 1]]):
            return None
        return chain._replace(ends=(*chain.ends[: s - 1], cut, *chain.ends[s:]))
