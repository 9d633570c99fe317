"""From the lattice to the state sequence: each ideal with the sums that a cut behind it needs."""

from __future__ import annotations

from operator import attrgetter

import numpy as np

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.states import FEATURES, SUMMED, States
from fxsplit.planner.kernels import fit
from fxsplit.planner.kernels.lattice import prefix_sums, reversed_edges

# Reads all of a node's figures in one call, which is several times as fast as one by one.
_read_figures = attrgetter(*SUMMED)


def sequence_states(costs: Costs, chains: Antichains) -> States:
    """Return the ideals as states: every measured figure summed over each ideal, and the states just below it.

    The ideals are numbered so that a subset has the smaller number, so their order is a state sequence as it is.
    """
    # A block weighs what its nodes weigh together.
    weight = np.zeros((len(chains.blocks), len(SUMMED)), np.float64)
    nodes = [(block, costs.by_name[name]) for block, names in enumerate(chains.blocks.members) for name in names]
    # Floats at once, as a whole number may be larger than those of numpy.
    figures = np.array([_read_figures(node) for _, node in nodes], np.float64).reshape(-1, len(SUMMED))
    np.add.at(weight, [block for block, _ in nodes], figures)
    # A sum grows from that of the ideal without its last block, which has a smaller number.
    # Most profiles have figures that are zero throughout: hosts' times, launches.
    some = np.flatnonzero(weight.any(axis=0))
    # One figure of all states lies behind the other in memory, as they are read figure by figure.
    features = np.zeros((len(chains), len(FEATURES)), np.float64, order="F")
    features[:, some] = fit(prefix_sums, len(chains))(chains.parent, chains.last, np.ascontiguousarray(weight[:, some]))
    features[:, len(SUMMED) :] = np.column_stack([chains.live_bytes, chains.live_gradient_bytes, chains.sent_bytes])
    pointer, start = fit(reversed_edges, len(chains))(chains.pointer, chains.child)
    return States(features, pointer, start)
