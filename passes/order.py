"""order: sum the measured figures over each ideal, which gives the state sequence; learns States.

An *ideal* is a set of nodes after which the graph can be cut (see augment.py). An ideal with its sums is a *state*.
`augment` has enumerated the ideals, and `partition` cuts the sequence of states into stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.graph import IR
from fxsplit.planner.lattice.sequence import sequence_states


@dataclass(frozen=True)
class Order:
    """Sum every measured figure over each state, and list the states just below it."""

    name: ClassVar[str] = "order"
    ignores_mode: ClassVar[bool] = True
    needs: ClassVar[tuple[type, ...]] = (Costs, Antichains)
    learns: ClassVar[tuple[type, ...]] = (States,)
    ignores_graph: ClassVar[bool] = True

    def __call__(self, ir: IR) -> IR:
        """Learn States from Costs and Antichains."""
        # An ideal has a larger number than its subsets, so the numbers already form a state sequence.
        made = sequence_states(ir[Costs], ir[Antichains])
        return ir.learn(made).note(states=len(made))
