"""Whether a stage fits, to the byte: what the search asks of a chain that it has found.

The search knows a lower bound of what a stage holds (see space.py). Where a stage of the best chain holds more than its
devices have, that pair of states is refused from then on, and the search goes on. So the first chain that fits is the
best of all that fit, and none that fits is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.memory.microbatch import Crossings
from fxsplit.ir.facts.memory.stage import StageMemory, find_peak, measure_stage
from fxsplit.ir.facts.price import CostModel
from fxsplit.planner.kernels.tables import NO_BANS, Bans, Floats
from fxsplit.planner.problem.prices import Kind


@dataclass(eq=False)
class Scale:
    """Weighs stages by their kind and two states, and remembers what it has weighed."""

    costs: Costs
    chains: Antichains
    kinds: Sequence[Kind]
    model: CostModel
    _inside: dict[int, frozenset[str]] = field(default_factory=dict)
    _live: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _stages: dict[tuple[int, int, bool, bool], StageMemory] = field(default_factory=dict)
    _peaks: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def weigh(self, kind: int, begin: int, end: int) -> float:
        """Return the most bytes that the stage from one state to another holds at once."""
        # A search finds the same stages in many chains, and follows each of them once.
        known = self._peaks.get((kind, begin, end))
        if known is None:
            of = self.kinds[kind]
            # Kinds differ in how much there is at once, and not in what a microbatch takes.
            stage = self._measure(begin, end, recompute=bool(of.recompute), last=bool(of.last))
            known = self._peaks[kind, begin, end] = find_peak(stage, of.moments)
        return known

    def list_above(self, capacity: Floats) -> list[tuple[int, int, int]]:
        """Return the stages weighed so far that hold more than their kind's `capacity`, as kind, start and end."""
        return [key for key, peak in self._peaks.items() if peak > capacity[key[0]]]

    def _measure(self, begin: int, end: int, *, recompute: bool, last: bool) -> StageMemory:
        """Return what a stage holds of one microbatch, and always."""
        key = begin, end, recompute, last
        if key not in self._stages:
            before, inside = self._list_inside(begin), self._list_inside(end)
            self._stages[key] = measure_stage(
                self.costs,
                [n.name for n in self.costs.nodes if n.name in inside and n.name not in before],
                Crossings(self._list_live(begin), self._list_live(end)),
                optimizer_factor=self.model.optimizer_factor,
                recompute=recompute,
                last=last,
                forwards=self.model.forwards,
            )
        return self._stages[key]

    def _list_inside(self, state: int) -> frozenset[str]:
        """Return the nodes of a state."""
        if state not in self._inside:
            self._inside[state] = frozenset(self.chains.names(state))
        return self._inside[state]

    def _list_live(self, state: int) -> tuple[str, ...]:
        """Return the values that cross a cut right behind a state."""
        if state not in self._live:
            inside, nodes = self._list_inside(state), self.costs.by_name
            self._live[state] = tuple(
                name
                for name, _, _, readers, returned in self.costs.values
                if (name in inside or name not in nodes) and (returned or any(r not in inside for r in readers))
            )
        return self._live[state]


@dataclass(eq=False)
class Refused:
    """The pairs of states, by kind of move, of which a search knows that their stage does not fit."""

    pairs: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    _known: Bans | None = None

    @classmethod
    def of(cls, stages: Iterable[tuple[int, int, int]]) -> Refused:
        """Return what refuses some stages, each a kind, a start and an end."""
        refused = cls()
        for stage in stages:
            refused.add(*stage)
        return refused

    def add(self, kind: int, begin: int, end: int) -> None:
        """Refuse a stage."""
        self.pairs.setdefault(kind, []).append((begin, end))
        self._known = None

    def list_bans(self, n_kinds: int, n_states: int) -> Bans:
        """Return the pairs as arrays, for the kernels."""
        if not self.pairs:
            return NO_BANS
        if self._known is None:
            self._known = _build(self.pairs, n_kinds, n_states)
        return self._known

    def list_among(self, n_kinds: int, states: NDArray[np.int64]) -> Bans:
        """Return the pairs among some states, which are numbered by their places."""
        place = {int(state): i for i, state in enumerate(states)}
        some = {
            kind: [(place[a], place[b]) for a, b in pairs if a in place and b in place]
            for kind, pairs in self.pairs.items()
        }
        return _build(some, n_kinds, states.size) if any(some.values()) else NO_BANS

    def mark(self, kind: int, states: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Return which pairs of some states are refused for a kind, bool [starts, ends]; None where none are."""
        pairs: Iterable[tuple[int, int]] = self.pairs.get(kind, ())
        if not pairs:
            return None
        place = {int(state): i for i, state in enumerate(states)}
        found = np.zeros((states.size, states.size), np.bool_)
        for a, b in pairs:
            if a in place and b in place:
                found[place[a], place[b]] = True
        return found


def _build(pairs: dict[int, list[tuple[int, int]]], n_kinds: int, n_states: int) -> Bans:
    """Return pairs as CSR: the ends refused for each kind and start."""
    # A row of the arrays is one kind and one start.
    rows = sorted((kind * n_states + a, b) for kind, some in pairs.items() for a, b in some)
    counts = np.zeros(n_kinds * n_states + 1, np.int64)
    for row, _ in rows:
        counts[row + 1] += 1
    return Bans(np.cumsum(counts), np.array([b for _, b in rows], np.int32))
