"""From the lattice to the state sequence, with the sums that a cut at each state needs."""

from __future__ import annotations

import numpy as np

from fxsplit import kernels
from fxsplit.antichains import Antichains
from fxsplit.costs import Costs
from fxsplit.states import SUMMED, States


def sequence(costs: Costs, chains: Antichains) -> States:
    """Return the ideals as states: every measured figure summed over each, and the states just below it."""
    weight = np.zeros((len(chains.blocks), len(SUMMED)), np.float64)
    for block, names in enumerate(chains.blocks.members):
        for name in names:
            weight[block] += [getattr(costs.by_name[name], figure) for figure in SUMMED]
    sums = kernels.prefix_sums(chains.parent, chains.last, weight)
    features = np.column_stack([sums, chains.live_bytes, chains.live_gradient_bytes])
    pointer, start = kernels.reversed_edges(chains.pointer, chains.child)
    return States(np.ascontiguousarray(features), pointer, start)
