"""From the lattice to the state sequence: each ideal with the sums that price a cut after it."""

from __future__ import annotations

from operator import attrgetter

import numpy as np

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.states import FEATURES, SUMMED, States
from fxsplit.planner.kernels import fit
from fxsplit.planner.kernels.lattice import prefix_sums, reversed_edges

# One call reads all figures of a node, several times as fast as one call for each.
_read_figures = attrgetter(*SUMMED)


def sequence_states(costs: Costs, chains: Antichains) -> States:
    """Return the ideals as states: sums of every measured figure, and the edges to the states just below.

    An ideal has a larger number than all its subsets, so the numbers already form a state sequence.
    """
    # The figures of a block are the sums over its nodes.
    weight = np.zeros((len(chains.blocks), len(SUMMED)), np.float64)
    nodes = [(block, costs.by_name[name]) for block, names in enumerate(chains.blocks.members) for name in names]
    # Convert to float at once: a Python int may exceed numpy's range.
    figures = np.array([_read_figures(node) for _, node in nodes], np.float64).reshape(-1, len(SUMMED))
    np.add.at(weight, [block for block, _ in nodes], figures)
    # Each sum extends the sum of the ideal without its last block, which has a smaller number. Skip figures that are
    # zero throughout: most profiles have no host times or launches.
    some = np.flatnonzero(weight.any(axis=0))
    # Column-major, since the search reads one figure of all states at a time.
    features = np.zeros((len(chains), len(FEATURES)), np.float64, order="F")
    features[:, some] = fit(prefix_sums, len(chains))(chains.parent, chains.last, np.ascontiguousarray(weight[:, some]))
    features[:, len(SUMMED) :] = np.column_stack([chains.live_bytes, chains.live_gradient_bytes, chains.sent_bytes])
    pointer, start = fit(reversed_edges, len(chains))(chains.pointer, chains.child)
    return States(features, pointer, start)
