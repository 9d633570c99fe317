"""From the lattice to the state sequence: each ideal with the sums that a cut behind it needs."""

from __future__ import annotations

import numpy as np

from fxsplit.ir.facts.antichains import Antichains
from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.states import SUMMED, States
from fxsplit.planner.kernels import fit
from fxsplit.planner.kernels.lattice import prefix_sums, reversed_edges


def sequence_states(costs: Costs, chains: Antichains) -> States:
    """Return the ideals as states: every measured figure summed over each ideal, and the states just below it.

    The ideals are numbered so that a subset has the smaller number, so their order is a state sequence as it is.
    """
    # A block weighs what its nodes weigh together.
    weight = np.zeros((len(chains.blocks), len(SUMMED)), np.float64)
    for block, names in enumerate(chains.blocks.members):
        for name in names:
            # A whole number may be larger than those of numpy.
            weight[block] += np.array([getattr(costs.by_name[name], figure) for figure in SUMMED], np.float64)
    # A sum grows from that of the ideal without its last block, which has a smaller number.
    sums = fit(prefix_sums, len(chains))(chains.parent, chains.last, weight)
    features = np.column_stack([sums, chains.live_bytes, chains.live_gradient_bytes])
    pointer, start = fit(reversed_edges, len(chains))(chains.pointer, chains.child)
    return States(np.ascontiguousarray(features), pointer, start)
