"""Baselines: how people split by hand, priced like the planner's plans, to stand beside them.

For example four nodes of 1, 1, 1 and 3 ms on two devices: "even" cuts behind the second node, for a slowest stage of
4 ms, and "time" behind the third, for 3 ms.
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


def _nearest(weight: Floats, n_stages: int) -> list[int]:
    """Return where an ascending sequence comes closest to each of `n_stages` equal shares, every stage non-empty."""
    # The first of two equally close positions is taken, and each stage still to come keeps a position.
    last = weight.size - 1
    cuts = [0]
    for stage in range(1, n_stages):
        share = weight[-1] * stage / n_stages
        cut = int(np.abs(weight - share).argmin())
        cuts.append(min(max(cut, cuts[-1] + 1), last - (n_stages - stage)))
    return [*cuts, last]


def _blocks(weight: Floats, n_stages: int) -> list[int]:
    """Return the cuts of an ascending sequence whose largest part is smallest: linear partitioning, by bisection.

    This is how torchgpipe balances by time, after Barany and Grinberg, "Block partitions of sequences" (2015).
    """
    last = weight.size - 1

    def filled(limit: float) -> list[int]:
        """Return the cuts after filling one part after another up to a limit; the last part takes the rest."""
        cuts = [0]
        for stage in range(1, n_stages):
            full = int(np.searchsorted(weight, weight[cuts[-1]] + limit, side="right")) - 1
            cuts.append(min(max(full, cuts[-1] + 1), last - (n_stages - stage)))
        return [*cuts, last]

    # A limit is possible if filling up to it leaves no larger rest; the smallest possible limit is searched.
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
    "even": ("nodes", _nearest),
    "parameters": ("parameter_bytes", _nearest),
    "time": ("time", _nearest),
    "block": ("time", _blocks),
}
"""What each baseline shares out among the stages of one topological order, and how.

"even", "parameters" and "time" cut where the shares come closest to equal. "block" is the best split of the order if
traffic were free.
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
    """Return a baseline's plan for the devices in the machine's order, or None where there are too few blocks.

    Nothing is proven of it: its lower bound is zero. It may need more memory than there is.
    """
    what, cut = BASELINES[name]
    # By hand one cuts the sequence of a model's layers: the topological order that the blocks are numbered in.
    line = first_order(chains)
    count = len(machine)
    if len(line) <= count:
        return None
    weight = {
        "nodes": np.arange(len(line), dtype=np.float64),
        "parameter_bytes": states.column("parameter_bytes")[line],
        "time": (states.column("forward_ms") + states.column("backward_ms"))[line],
    }[what]
    # Each baseline cuts by its own figure, and is priced by the same model as the plan.
    cuts = cut(weight, count)
    sets = [set(chains.names(line[at])) for at in cuts]
    stages = [[n.name for n in costs.nodes if n.name in b - a] for a, b in itertools.pairwise(sets)]
    # One device a stage, in the machine's order.
    priced = price_split(costs, machine, workload, [(names, (i,), False) for i, names in enumerate(stages)], model)
    return Plan.of(priced, costs, machine, workload, model, lower_bound_ms=0.0, n_states=len(line))
