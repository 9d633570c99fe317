"""Check whether a stage fits to the byte, for a chain that the search has found.

The search knows a lower bound of a stage's memory (see space.py). If a stage of the best chain exceeds its devices'
memory, refuse that pair of states and search again. So the first chain that fits is the best of all that fit.
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
from fxsplit.planner.kernels.tables import NO_BANS, BannedStages, Floats
from fxsplit.planner.problem.prices import MoveKind


@dataclass(eq=False)
class Scale:
    """Weighs stages: it computes the exact peak memory of a stage, given by its kind and two states, and caches it."""

    costs: Costs
    chains: Antichains
    kinds: Sequence[MoveKind]
    model: CostModel
    _inside: dict[int, frozenset[str]] = field(default_factory=dict)
    _live: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _stages: dict[tuple[int, int, bool, bool], StageMemory] = field(default_factory=dict)
    _peaks: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def weigh(self, kind: int, begin: int, end: int) -> float:
        """Return the peak memory in bytes of the stage between two states."""
        # A search finds the same stage in many chains.
        known = self._peaks.get((kind, begin, end))
        if known is None:
            of = self.kinds[kind]
            # Kinds differ in the number of microbatches in flight, not in the memory of one microbatch.
            stage = self._measure(begin, end, recompute=bool(of.recompute), last=bool(of.last))
            known = self._peaks[kind, begin, end] = find_peak(stage, of.moments)
        return known

    def list_above(self, capacity: Floats) -> list[tuple[int, int, int]]:
        """Return (kind, start, end) of each stage weighed so far that exceeds its kind's `capacity`."""
        return [key for key, peak in self._peaks.items() if peak > capacity[key[0]]]

    def _measure(self, begin: int, end: int, *, recompute: bool, last: bool) -> StageMemory:
        """Return the memory of a stage: constant, and for each microbatch."""
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
        """Return the names of the nodes in the ideal of a state, which is given by its number."""
        if state not in self._inside:
            self._inside[state] = frozenset(self.chains.names(state))
        return self._inside[state]

    def _list_live(self, state: int) -> tuple[str, ...]:
        """Return the values that cross a cut after a state."""
        if state not in self._live:
            inside, nodes = self._list_inside(state), self.costs.by_name
            self._live[state] = tuple(
                name
                for name, _, _, readers, returned in self.costs.values
                if (name in inside or name not in nodes) and (returned or any(r not in inside for r in readers))
            )
        return self._live[state]


@dataclass(eq=False)
class RefusedStages:
    """Stages that the search knows not to fit: pairs (start, end) of states, by kind of move."""

    pairs: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    _known: BannedStages | None = None

    @classmethod
    def of(cls, stages: Iterable[tuple[int, int, int]]) -> RefusedStages:
        """Create it from refused stages, each a (kind, start, end)."""
        refused = cls()
        for stage in stages:
            refused.add(*stage)
        return refused

    def add(self, kind: int, begin: int, end: int) -> None:
        """Refuse a stage."""
        self.pairs.setdefault(kind, []).append((begin, end))
        self._known = None

    def list_bans(self, n_kinds: int, n_states: int) -> BannedStages:
        """Return all refused stages as arrays for the kernels.

        n_kinds: the number of kinds of stages. n_states: the number of states.
        """
        if not self.pairs:
            return NO_BANS
        if self._known is None:
            self._known = _build(self.pairs, n_kinds, n_states)
        return self._known

    def list_among(self, n_kinds: int, states: NDArray[np.int64]) -> BannedStages:
        """Return the refused stages that begin and end in `states`. Each state is numbered by its place in `states`.

        n_kinds: the number of kinds of stages.
        """
        place = {int(state): i for i, state in enumerate(states)}
        some = {
            kind: [(place[a], place[b]) for a, b in pairs if a in place and b in place]
            for kind, pairs in self.pairs.items()
        }
        return _build(some, n_kinds, states.size) if any(some.values()) else NO_BANS

    def mark(self, kind: int, states: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Return the refused pairs of one kind within `states`, as bool [starts, ends], or None."""
        pairs: Iterable[tuple[int, int]] = self.pairs.get(kind, ())
        if not pairs:
            return None
        place = {int(state): i for i, state in enumerate(states)}
        found = np.zeros((states.size, states.size), np.bool_)
        for a, b in pairs:
            if a in place and b in place:
                found[place[a], place[b]] = True
        return found


def _build(pairs: dict[int, list[tuple[int, int]]], n_kinds: int, n_states: int) -> BannedStages:
    """Return the pairs in CSR form: the refused ends of each kind and start."""
    # A row is one kind and one start.
    rows = sorted((kind * n_states + a, b) for kind, some in pairs.items() for a, b in some)
    counts = np.zeros(n_kinds * n_states + 1, np.int64)
    for row, _ in rows:
        counts[row + 1] += 1
    return BannedStages(np.cumsum(counts), np.array([b for _, b in rows], np.int32))
