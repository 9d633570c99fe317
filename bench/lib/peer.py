"""The paper's planner in plain Python, over all pairs of states, to compare fxsplit's planner with.

    A(j, m) = min over s < j and m' <= m of max(A(s, m - m'), T(s, j, m'))

A(j, m) is the smallest bottleneck of the nodes of state j on exactly m devices. T(s, j, m') is the time of a stage from
state s to state j on m' replicas: (time + all-reduce) / m', as PipeDream computes it (Narayanan et al. 2019). Traffic
between stages is not priced. Only states s that state j contains count: the original takes others too, by mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.states import States


def subsets(chains: Antichains) -> list[list[int]]:
    """Return, for each state, the states that it contains. They depend on no machine."""
    # States are ordered by size, so a state contains only earlier ones.
    sets = [frozenset(chains.ideal(i)) for i in range(len(chains))]
    return [[s for s in range(j) if sets[s] < sets[j]] for j in range(len(chains))]


def optimum_ms(below: Sequence[Sequence[int]], states: States, devices: int, bytes_per_ms: float) -> float:
    """Return the smallest bottleneck over all chains of states and replications."""
    count = len(below)
    time = (states.column("forward_ms") + states.column("backward_ms")).tolist()
    weights = states.column("parameter_bytes").tolist()
    best = [[inf] * (devices + 1) for _ in range(count)]
    # best[j][m]: the smallest bottleneck of the nodes of state j on m devices.
    best[0][0] = 0.0
    for j in range(1, count):
        for m in range(1, devices + 1):
            least = inf
            for s in below[j]:
                # The last stage holds the nodes of state j that are not in s, on `replicas` replicas.
                for replicas in range(1, m + 1):
                    before = best[s][m - replicas]
                    reduce = 4.0 * (replicas - 1) * (weights[j] - weights[s]) / (bytes_per_ms * replicas * replicas)
                    stage = (time[j] - time[s]) / replicas + reduce
                    least = min(least, max(before, stage))
            best[j][m] = least
    return best[-1][devices]
