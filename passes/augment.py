"""augment: enumerate the augmented antichains of the graph and what is live across each; learns Antichains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxsplit.costs import Costs
from fxsplit.errors import ChainError
from fxsplit.ir import IR
from fxsplit.planner.lattice import antichains


@dataclass(frozen=True)
class Augment:
    """Enumerate every ideal, up to `max_states` of them.

    A graph with more is planned on the prefixes of one topological order, and its plan carries a gap instead of a
    proof.
    """

    max_states: int = 1_000_000

    name: ClassVar[str] = "augment"

    def __post_init__(self) -> None:
        if self.max_states < 1:
            raise ChainError(f"augment{{max_states={self.max_states}}}: give a positive number")

    def __call__(self, ir: IR) -> IR:
        """Learn Antichains from Costs."""
        return ir.learn(antichains(ir[Costs], self.max_states))
