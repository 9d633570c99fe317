"""States: the ideals as a sequence, each after all its subsets, with the sums that a cut after it needs.

The pass `order` makes this fact. The load of a stage from state J to state I follows from sums: the sums of I minus
the sums of J, and the bytes that cross the cuts at J and at I.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from fxsplit.errors import BrokenFact
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.lattice.antichains import Antichains, list_ends
from fxsplit.ir.facts.lattice.arrays import Floats, Ints, ReadOnlyArrays
from fxsplit.ir.graph import IR, Fact

FEATURES = (
    "forward_ms",
    "backward_ms",
    "parameter_bytes",
    "buffer_bytes",
    "kept_bytes",
    "host_ms",
    "forward_launch_ms",
    "backward_launch_ms",
    "live_bytes",
    "live_gradient_bytes",
    "sent_bytes",
)
SUMMED = FEATURES[:8]
"""The features that are sums over the nodes of an ideal.

The other features sum the values that cross the cut after the ideal; `sent_bytes` is their size on a link.
"""


@dataclass(frozen=True, eq=False)
class States(ReadOnlyArrays, Fact):
    """The state sequence: row i of `features` (float64 [states, FEATURES]) describes ideal i.

    `in_pointer` and `in_from` (CSR) list, for each state, the ideals that lack only one block of it. They have smaller
    numbers, so a single sweep in this order sees an ideal after all its subsets.
    """

    features: Floats
    in_pointer: Ints
    in_from: Ints

    _verified: Costs | None = field(default=None, init=False, repr=False)

    derives_from: ClassVar[tuple[type, ...]] = (Costs, Antichains)
    made_by: ClassVar[str] = "order"

    def __len__(self) -> int:
        return int(self.features.shape[0])

    def column(self, name: str) -> Floats:
        """Return one feature of every state."""
        return self.features[:, FEATURES.index(name)]

    def verify(self, ir: IR) -> None:
        """Raise BrokenFact unless each state comes after its subsets, and no sum is less than a subset's."""
        if len(self) != len(ir[Antichains]):
            raise BrokenFact(f"{len(self)} states for {len(ir[Antichains])} antichains")
        end = np.repeat(np.arange(len(self)), np.diff(self.in_pointer))
        # The search sweeps through the states once, and must meet every state after the states below it.
        if not np.all(self.in_from < end):
            raise BrokenFact("a state comes before a subset of it")
        # A sum that shrinks would give a stage negative time. Only the summed figures grow; live bytes go up and down.
        grown = self.features[end, : len(SUMMED)] - self.features[self.in_from, : len(SUMMED)]
        # The comparison is negated, so that NaN is refused too.
        if grown.size and not grown.min() >= -1e-9 * max(1.0, float(self.features.max())):
            raise BrokenFact("a state sums to less than a subset of it")
        if self._verified is not ir[Costs]:
            self._verify_figures(ir[Antichains], ir[Costs])
            # Facts do not change, so once is enough.
            object.__setattr__(self, "_verified", ir[Costs])

    def _verify_figures(self, chains: Antichains, costs: Costs) -> None:
        """Raise BrokenFact unless every figure, and the list of states below each state, agree with the ideals."""
        # An ideal has one block more than its parent, so all sums follow from the sums of the empty ideal.
        own = np.array([[sum_figures(costs, names, figure) for figure in SUMMED] for names in chains.blocks.members])
        own = own.reshape(-1, len(SUMMED))
        grown = self.features[1:, : len(SUMMED)] - self.features[chains.parent[1:], : len(SUMMED)]
        live = np.column_stack([chains.live_bytes, chains.live_gradient_bytes, chains.sent_bytes])
        slack = 1e-9 * max(1.0, float(self.features.max()))
        sums = not self.features[0, : len(SUMMED)].any() and np.allclose(grown, own[chains.last[1:]], 0.0, slack)
        if not (sums and np.array_equal(self.features[:, len(SUMMED) :], live)):
            raise BrokenFact("the states have other figures than the costs and antichains: run 'order' again")
        start = np.repeat(np.arange(len(chains)), np.diff(chains.pointer))
        below = np.column_stack([start, chains.child])[np.lexsort((start, chains.child))][:, 0]
        pointer = np.concatenate([[0], np.cumsum(np.bincount(chains.child, minlength=len(chains)))])
        if not (np.array_equal(self.in_pointer, pointer) and np.array_equal(self.in_from, below)):
            raise BrokenFact("the states have other states below them than the antichains say: run 'order' again")

    def __str__(self) -> str:
        """Return a row for each state: the summed times and bytes, and the bytes that cross the cut after it."""
        head = "state" + "".join(f"{f:>20}" for f in FEATURES)
        rows = list_ends(len(self), lambda i: f"{i:>5}" + "".join(f"{v:>20.3f}" for v in self.features[i]))
        return "\n".join([head, *rows])


def sum_figures(costs: Costs, names: Iterable[str], figure: str) -> float:
    """Return the sum of one figure over some nodes."""
    return float(sum(getattr(costs.by_name[name], figure) for name in names))
