"""Search for the line of stages with the shortest step, beside a lower bound over all of them.

A stage on all devices often comes close to the bound, and costs nothing to try, so it is first. Then come the lines of
the labels that the bound met: they pass all of its tests. Annealing of cuts and replicas begins from the best of them.
If memory is limited, a list schedule may not fit although a named one does: then all lines are tried if they are few.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf

import numpy as np

from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.planner.step.bound import ROUNDING, Line, LineBound, Stage, bound_by_work
from fxsplit.planner.step.kernels import search as kernels
from fxsplit.planner.step.kernels.arrays import Ints, Levels, Prices
from fxsplit.planner.step.kernels.search import NEVER, Lattice, Order, make_stages
from fxsplit.planner.step.prices import sort_into_levels

CLOSE = 3e-4
"""A step that is longer than the bound by this share at most is good enough."""
WALKS, STARTS, CHANGES, HEAT = 8, 6, 3_000, 0.01
"""How many annealings there are, from how many lines, of how many changes, and at which temperature, in steps."""
LEVELS, LEVEL_LABELS, LEVEL_SAMPLES = 300, 12, 5
"""The levels of too many ideals, and the labels and samples of their bound."""
FEW_ACTIONS = 6_000
"""If memory is limited and all lines together have so many actions at most, all are tried: each is simulated."""
FEW_LABELS, ROUGH = 6, 2e-3
"""The labels and the width of the bisection that finds lines without replicas to start from."""


@dataclass
class LineSearch:
    """The lines known so far, with the step of each one's best list schedule in ms, and a bound of all lines' steps.

    `recompute` says which stages recompute: "never", "always", or with "auto" any where memory is limited. `steps` has
    lines in the order in which they were found, `rules` the rule of the list schedule of each. Lines that do not fit in
    memory have the step NEVER: if memory is limited, `measure` finds the step of a line that may be the best. The bound
    is NEVER if no line fits, in any order of work. `usual` are the lines from elsewhere.
    """

    prices: Prices
    lattice: Lattice
    devices: int
    m: int
    most_replicas: int
    recompute: str = "never"
    measure: Callable[[Line], float] | None = None
    steps: dict[Line, float] = field(default_factory=dict)
    rules: dict[Line, int] = field(default_factory=dict)
    usual: list[Line] = field(default_factory=list)
    bound: float = 0.0
    _bound: LineBound | None = None

    def __post_init__(self) -> None:
        # More replicas than microbatches have nothing to do.
        self.most_replicas = min(self.most_replicas, self.devices, self.m)
        self._room = Order(np.zeros((self.devices, 3 * self.m, 2), np.int64), np.zeros(self.devices, np.int64))

    @property
    def least_prices(self) -> Prices:
        """The least that stages take: with "always", each runs its forward again before its input gradient."""
        again = self.prices.forward if self.recompute == "always" else 0.0
        return self.prices._replace(input=self.prices.input + again)

    @property
    def best(self) -> float:
        """The shortest step known, in ms; NEVER without a line that fits."""
        return min(self.steps.values(), default=NEVER)

    def is_close(self) -> bool:
        """Return whether the best line is close enough to the bound."""
        return self.best <= self.bound * (1 + CLOSE)

    def rank(self) -> list[Line]:
        """Return the known lines that fit, the best first."""
        return sorted((line for line, step in self.steps.items() if step < NEVER), key=self.steps.__getitem__)

    def run(self, usual: Iterable[Line] = (), deadline: float = inf, *, whole: bool = True) -> None:
        """Find lines and the bound; stops at the deadline, of time.monotonic, but not within the bound.

        `usual` are further lines to begin from, which are made only if they are needed. `whole`: whether the ideals are
        all that there are, with their own prices. Otherwise they say nothing of other plans, and the bound is that of
        the work.
        """
        full = self.prices.forward.size - 1
        for replicas in range(1, self.most_replicas + 1):
            self.add((Stage(0, full, replicas, self.recompute == "always"),))
        self.bound = bound_by_work(self.least_prices, self.devices, self.m)
        if self.best == NEVER:
            self._add_usual(usual)
        if whole and not self.is_close():
            self._find_bound()
        # The bound meets more lines if it begins far above.
        if not self.is_close():
            self._add_usual(usual)
            few = self._list_few() if self.measure is not None else []
            if few:
                self._try_all(few, deadline)
            else:
                self._anneal(deadline)

    def _add_usual(self, usual: Iterable[Line]) -> None:
        """Add lines to begin from. A replica without a microbatch is left out."""
        for found in usual:
            line = tuple(stage._replace(replicas=min(stage.replicas, self.m)) for stage in found)
            self.usual.append(line)
            self.add(line)

    def _find_bound(self) -> None:
        """Find the bound, and add the lines that it meets."""
        prices: Prices | Levels = self.least_prices
        if self.prices.nested.size == 0:
            prices = sort_into_levels(self.least_prices, LEVELS)
        lists = (LEVEL_LABELS, LEVEL_SAMPLES) if isinstance(prices, Levels) else ()
        self._bound = LineBound(prices, self.devices, self.m, self.most_replicas, *lists)
        self.bound, met = self._bound.bisect(self.bound, self.best)
        for line in met:
            self.add(line)
        if met and self.most_replicas > 1 and not self.is_close():
            single = LineBound(prices, self.devices, self.m, 1, FEW_LABELS)
            for line in single.bisect(self.bound, self.best, ROUGH)[1]:
                self.add(line)

    def _list_few(self) -> list[Line]:
        """Return all lines, each with all choices of recompute, or [] if they are too many."""
        most = FEW_ACTIONS // (self.devices * self.m)
        nested, full = self.prices.nested, self.prices.forward.size - 1
        again = {"never": (False,), "always": (True,), "auto": (False, True)}[self.recompute]
        found: list[Line] = []
        begun: list[tuple[Line, int]] = [((), self.devices)] if nested.size else []
        while begun:
            line, left = begun.pop()
            begin = line[-1].end if line else 0
            if begin == full:
                found.append(line)
            elif len(begun) + len(found) > most:
                return []
            else:
                choices = product(np.flatnonzero(nested[begin]), range(1, min(self.most_replicas, left) + 1), again)
                begun += [((*line, Stage(begin, int(end), r, f)), left - r) for end, r, f in choices if end > begin]
        return found

    def _try_all(self, lines: Sequence[Line], deadline: float) -> None:
        """Measure the lines that may be better than the best, those with the smallest bounds first."""
        assert self.measure is not None, "the caller has looked"
        bounds = {line: self.bound_line(line) for line in lines}
        for line in sorted(bounds, key=bounds.__getitem__):
            if bounds[line] >= self.best or time.monotonic() > deadline:
                break
            self._judge(line)
            self.steps[line] = min(self.steps[line], self.measure(line))

    def prove(self, step: float) -> None:
        """Raise the bound to a step in ms, if it is close and no line can be any better."""
        # Bisection ends at a width, and only a test at the step itself closes the rest.
        close = self.bound < step <= self.bound * (1 + CLOSE)
        if close and self._bound is not None and not self._bound.test(step * (1 - ROUNDING)):
            self.bound = step

    def _anneal(self, deadline: float) -> None:
        """Anneal the best lines in turn."""
        if self.best == NEVER:
            return
        room = np.zeros((self.devices, 4), np.int64)
        recomputes = self.recompute == "auto" and self.prices.capacity < inf
        for turn in range(WALKS):
            if self.is_close() or time.monotonic() > deadline:
                break
            ranked = self.rank()
            line = ranked[turn % min(STARTS, len(ranked))]
            # Every second walk of a line without replicas adds none.
            plain = turn % 2 and all(stage.replicas == 1 for stage in line)
            most = 1 if plain else self.most_replicas
            room[: len(line)] = line
            _, k = kernels.anneal_line(
                room,
                len(line),
                self.devices,
                self.m,
                most,
                self.prices,
                self.lattice,
                CHANGES,
                HEAT,
                self.bound * (1 + CLOSE),
                turn,
                self._room,
                recomputes,
            )
            self.add(read_line(room[:k]))

    def add(self, line: Line) -> None:
        """Judge a line by list schedules, unless it is known; also with stages that recompute, if memory is short."""
        if self.recompute == "always":
            line = tuple(stage._replace(recompute=True) for stage in line)
        if line in self.steps:
            return
        self._judge(line)
        if self.recompute == "auto" and self.prices.capacity < inf:
            relieved = self._relieve(line)
            if relieved not in self.steps:
                self._judge(relieved)

    def _relieve(self, line: Line) -> Line:
        """Return a line in which stages recompute that hold fewer microbatches than 1F1B has in flight."""
        stages, most = make_stages(len(line)), np.zeros(len(line), np.int64)
        kernels.price_line(np.array(line, np.int64), len(line), self.m, self.prices, stages)
        kernels.choose_rule(2, len(line), self.m, stages.replicas, most)
        short = stages.room < np.minimum(most, self.m)
        return tuple(stage._replace(recompute=stage.recompute or bool(s)) for stage, s in zip(line, short, strict=True))

    def _judge(self, line: Line) -> None:
        """Judge a line by list schedules."""
        stages, most = make_stages(len(line)), np.zeros(len(line), np.int64)
        step, self.rules[line] = kernels.judge_line(
            np.array(line, np.int64), len(line), self.m, self.prices, NEVER, stages, most, self._room
        )
        # Sums over ideals leave out what single actions need: only a plan says whether a line fits.
        if self.measure is not None and step < self.best:
            step = self.measure(line)
        self.steps[line] = step

    def bound_line(self, line: Line) -> float:
        """Return a bound of one line's step in any order, in ms."""
        stages = make_stages(len(line))
        # Without a limit of memory no backward is taken to be whole.
        prices = self.prices._replace(capacity=inf)
        kernels.price_line(np.array(line, np.int64), len(line), self.m, prices, stages)
        return kernels.bound_line(len(line), self.m, stages)

    def list_actions(self, line: Line, fewer: Sequence[int] = ()) -> list[list[tuple[int, int]]]:
        """Return the actions of each device in a line's best list schedule: F, I or W by number, and microbatch.

        `fewer`: by how many microbatches each stage has less room than its sums say (default: by none). Returns [] if a
        stage then has none.
        """
        stages, most, k = make_stages(len(line)), np.zeros(len(line), np.int64), len(line)
        kernels.price_line(np.array(line, np.int64), k, self.m, self.prices, stages)
        rule = self.rules[line]
        if any(fewer):
            less = np.array(fewer, np.int64)
            # The first thing that a stage gives up is that weight gradients wait while it recomputes.
            whole = (less > 0) & np.array([stage.recompute for stage in line]) & (stages.late >= 0)
            for s in np.flatnonzero(whole).tolist():
                kernels.join_backward(stages, s)
            stages.room[:] -= less - whole
            _, rule = kernels.judge_stages(k, self.m, stages, NEVER, most, self._room)
        if rule < 0:
            return []
        forward_first, share = kernels.choose_rule(rule, k, self.m, stages.replicas, most)
        self._room.counts[:] = 0
        kernels.list_order(k, self.m, stages, most, forward_first, share, self._room, True)
        counts = self._room.counts[: int(stages.replicas.sum())]
        return [
            [(int(a), int(b)) for a, b in rows[:count]] for rows, count in zip(self._room.actions, counts, strict=False)
        ]


def read_line(rows: Ints) -> Line:
    """Return the line of an array [stages, 4] of begin, end, replicas and recompute."""
    return tuple(Stage(int(row[0]), int(row[1]), int(row[2]), bool(row[3])) for row in rows)


def list_neighbours(chains: Antichains) -> Lattice:
    """Return the neighbours of each ideal, which have one block more or less."""
    start = np.repeat(np.arange(len(chains)), np.diff(chains.pointer))
    ends = chains.child.astype(np.int64)
    one, other = np.concatenate([start, ends]), np.concatenate([ends, start])
    order = np.lexsort((other, one))
    pointer: Ints = np.zeros(len(chains) + 1, np.int64)
    np.cumsum(np.bincount(one, minlength=len(chains)), out=pointer[1:])
    return Lattice(pointer, np.ascontiguousarray(other[order]))
