"""order: put the states in topological sequence, with prefix sums and cut bytes; learns States."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fxsplit import kernels
from fxsplit.antichains import Antichains
from fxsplit.costs import Costs
from fxsplit.ir import IR
from fxsplit.states import SUMMED, States


@dataclass(frozen=True)
class Order:
    """Sum every measured figure over each state and list the states just below it."""

    name: ClassVar[str] = "order"

    def __call__(self, ir: IR) -> IR:
        """Learn States from Costs and Antichains."""
        costs, chains = ir[Costs], ir[Antichains]
        weight = np.zeros((len(chains.blocks), len(SUMMED)), np.float64)
        for block, names in enumerate(chains.blocks.members):
            for name in names:
                weight[block] += [getattr(costs.by_name[name], figure) for figure in SUMMED]
        sums = kernels.prefix_sums(chains.parent, chains.last, weight)
        features = np.column_stack([sums, chains.live_bytes, chains.live_gradient_bytes])
        start = np.repeat(np.arange(len(chains), dtype=np.int32), np.diff(chains.pointer))
        by_end = np.argsort(chains.child, kind="stable")
        pointer = np.zeros(len(chains) + 1, np.int32)
        np.cumsum(np.bincount(chains.child, minlength=len(chains)), out=pointer[1:])
        return ir.learn(States(np.ascontiguousarray(features), pointer, start[by_end]))
