"""partition: cut the state sequence into stages so that the slowest is as fast as possible; learns Plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxsplit.ir.facts.antichains import Antichains
from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.machine import Machine
from fxsplit.ir.facts.pins import Pins
from fxsplit.ir.facts.states import States
from fxsplit.ir.facts.workload import Workload
from fxsplit.ir.graph import IR
from fxsplit.planner.solve import Options, partition


@dataclass(frozen=True)
class Partition(Options):
    """Minimise the largest stage load by dynamic programming over the states, under every device's memory."""

    name: ClassVar[str] = "partition"

    def __call__(self, ir: IR) -> IR:
        """Learn Plan from States; raises PlanError when none fits, saying by how much and where."""
        costs, pins = ir[Costs], ir.get(Pins)
        pinned = pins.nodes(costs) if pins else {}
        plan = partition(costs, ir[Antichains], ir[States], ir[Machine], ir[Workload], pinned, self)
        return ir.learn(plan)
