"""augment: enumerate the augmented antichains of the graph and what is live across each; learns Antichains."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from fxsplit.errors import ChainError
from fxsplit.ir.facts.blocks import Blocks
from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.machine import Machine
from fxsplit.ir.facts.pins import Pins
from fxsplit.ir.graph import IR
from fxsplit.planner.lattice import enumerate_within


@dataclass(frozen=True)
class Augment:
    """Enumerate every ideal, up to `max_states` of them.

    In a graph with more, light nodes join what they follow, or it is planned on the prefixes of one topological order:
    its plan carries a gap instead of a proof.
    """

    max_states: int = 1_000_000

    name: ClassVar[str] = "augment"

    def __post_init__(self) -> None:
        if self.max_states < 1:
            raise ChainError(f"augment{{max_states={self.max_states}}}: give a positive number")

    def __call__(self, ir: IR) -> IR:
        """Learn Antichains from Costs."""
        costs, machine, pins = ir[Costs], ir.get(Machine), ir.get(Pins)
        memory = min(d.memory_bytes for d in machine.devices) if machine else inf
        apart = pins.nodes(costs) if pins else {}
        blocks = Blocks.of(costs)
        at_least = len(machine) if machine and machine.uniform else len(blocks)
        return ir.learn(enumerate_within(costs, blocks, self.max_states, memory, apart, at_least))
