"""Weigh the memory of stages for the planner's fuzzer, with sets of nodes as bits of a number."""

from __future__ import annotations

from functools import cache

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.memory.microbatch import Crossings
from fxsplit.ir.facts.memory.moments import Moments
from fxsplit.ir.facts.memory.stage import StageMemory, find_peak, measure_stage
from fxsplit.planner import Options


class Weighing:
    """Computes the memory of stages between two sets of nodes. bit: the bit of each node. full: all nodes."""

    costs: Costs
    options: Options
    bit: dict[str, int]
    full: int

    def weigh(self, begin: int, end: int, moments: Moments, *, again: bool) -> float:
        """Return the peak in bytes of a stage; `again` says whether it runs forward twice."""
        return find_peak(self._measure(begin, end, again), moments)

    @cache  # noqa: B019  an oracle lives for one case
    def _measure(self, begin: int, end: int, again: bool) -> StageMemory:
        """Return the stage's memory for one microbatch, and its constant memory."""
        return measure_stage(
            self.costs,
            [n.name for n in self.costs.nodes if end & ~begin & self.bit[n.name]],
            Crossings(self._list_crossing(begin), self._list_crossing(end)),
            optimizer_factor=self.options.optimizer_factor,
            recompute=again,
            last=end == self.full,
            forwards=self.options.model != "direct",
        )

    def _list_crossing(self, ideal: int) -> list[str]:
        """Return the values that cross a cut right after a set of nodes."""
        found = []
        for name, _, _, readers, returned in self.costs.values:
            made = name not in self.bit or ideal & self.bit[name]
            if made and (returned or any(not ideal & self.bit[reader] for reader in readers)):
                found.append(name)
        return found
