"""From the lattice to the state sequence, with the sums that a cut at each state needs."""

from __future__ import annotations

import numpy as np

from fxsplit.ir.facts.antichains import Antichains
from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.states import SUMMED, States
from fxsplit.planner import kernels


def sequence_states(costs: Costs, chains: Antichains) -> States:
    """Return the ideals as states: every measured figure summed over each, and the states just below it."""
    weight = np.zeros((len(chains.blocks), len(SUMMED)), np.float64)
    for block, names in enumerate(chains.blocks.members):
        for name in names:
            weight[block] += [getattr(costs.by_name[name], figure) for figure in SUMMED]
    sums = kernels.prefix_sums(chains.parent, chains.last, weight)
    features = np.column_stack([sums, chains.live_bytes, chains.live_gradient_bytes])
    pointer, start = kernels.reversed_edges(chains.pointer, chains.child)
    return States(np.ascontiguousarray(features), pointer, start)
