"""Baselines: how people split by hand, priced like the planner's plans for comparison.

Example: four nodes of 1, 1, 1 and 3 ms on two devices. "even" cuts after the second node, so the slowest stage takes 4
ms. "time" cuts after the third node: 3 ms.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import CostModel, price_split
from fxsplit.planner.search.dense import first_order

Floats = NDArray[np.float64]


def _cut_nearest(weight: Floats, n_stages: int) -> list[int]:
    """Return the cuts closest to equal shares of `weight`, with no empty stage.

    `weight[i]` is the sum over all nodes before place i of the line. The cuts are places, with the first and the last.
    """
    # Of two equally close positions take the first, and leave one position for each later stage.
    last = weight.size - 1
    cuts = [0]
    for stage in range(1, n_stages):
        share = weight[-1] * stage / n_stages
        cut = int(np.abs(weight - share).argmin())
        cuts.append(min(max(cut, cuts[-1] + 1), last - (n_stages - stage)))
    return [*cuts, last]


def _cut_by_bisection(weight: Floats, n_stages: int) -> list[int]:
    """Return the cuts that make the largest part as small as possible, by bisection over its size.

    Arguments and cuts are those of `_cut_nearest`. This is torchgpipe's balance by time, after Barany and Grinberg,
    "Block partitions of sequences" (2015).
    """
    last = weight.size - 1

    def filled(limit: float) -> list[int]:
        """Fill one part after another up to `limit`, and return the cuts. The last part takes the rest."""
        cuts = [0]
        for stage in range(1, n_stages):
            full = int(np.searchsorted(weight, weight[cuts[-1]] + limit, side="right")) - 1
            cuts.append(min(max(full, cuts[-1] + 1), last - (n_stages - stage)))
        return [*cuts, last]

    # A limit is feasible if filling up to it leaves no larger last part. Find the smallest feasible limit.
    low, high = 0.0, float(weight[-1])
    best = filled(high)
    while high - low > 1e-12 * weight[-1]:
        middle = (low + high) / 2
        cuts = filled(middle)
        largest = float(np.diff(weight[cuts]).max())
        if largest <= middle:
            best, high = cuts, min(middle, largest)
        else:
            low = middle
    return min((best, filled(high)), key=lambda cuts: float(np.diff(weight[cuts]).max()))


BASELINES: dict[str, tuple[str, Callable[[Floats, int], list[int]]]] = {
    "even": ("nodes", _cut_nearest),
    "parameters": ("parameter_bytes", _cut_nearest),
    "time": ("time", _cut_nearest),
    "block": ("time", _cut_by_bisection),
}
"""For each baseline, the quantity that it balances over the stages of one topological order, and how it cuts.

"even", "parameters" and "time" cut at the positions closest to equal shares. "block" minimises the largest part, and
ignores traffic.
"""


def plan_baseline(
    name: str,
    costs: Costs,
    chains: Antichains,
    states: States,
    machine: Machine,
    workload: Workload,
    model: CostModel,
) -> Plan | None:
    """Return a baseline's plan on the devices in the machine's order, or None if the graph has too few blocks.

    The plan has no proof: its lower bound is 0. It may exceed the memory of the devices.
    """
    what, cut = BASELINES[name]
    # By hand one cuts the sequence of layers, which is the topological order that numbers the blocks.
    line = first_order(chains)
    count = len(machine)
    if len(line) <= count:
        return None
    weight = {
        "nodes": np.arange(len(line), dtype=np.float64),
        "parameter_bytes": states.column("parameter_bytes")[line],
        "time": (states.column("forward_ms") + states.column("backward_ms"))[line],
    }[what]
    # Each baseline cuts by its own quantity. The plan's cost model prices all of them.
    cuts = cut(weight, count)
    sets = [set(chains.names(line[at])) for at in cuts]
    stages = [[n.name for n in costs.nodes if n.name in b - a] for a, b in itertools.pairwise(sets)]
    # Each stage gets one device, in the machine's order.
    priced = price_split(costs, machine, workload, [(names, (i,), False) for i, names in enumerate(stages)], model)
    return Plan.assemble(priced, costs, machine, workload, model, lower_bound_ms=0.0, n_states=len(line))
