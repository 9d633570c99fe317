"""The regret of a plan: how much slower its slowest stage is than that of the best plan, for measured times."""

from __future__ import annotations

from dataclasses import replace

import fxsplit
from bench.estimates.operators import Times
from fxsplit.api.plan import lay_out
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import price_split

MACHINES = [Machine.planned(n, bytes_per_s=rate) for n in (4, 8) for rate in (10e9, 25e9)]
"""The machines to plan for: 4 and 8 devices, with links of 10 and 25 GB/s."""


def give_times(costs: Costs, times: Times) -> Costs:
    """Return costs with other times of the nodes in `times`."""
    given = {n.name: times.get(n.name, (n.forward_ms, n.backward_ms)) for n in costs.nodes}
    return replace(
        costs,
        nodes=tuple(replace(n, forward_ms=given[n.name][0], backward_ms=given[n.name][1]) for n in costs.nodes),
    )


def price(plan: Plan, costs: Costs, machine: Machine) -> float:
    """Return the load of the slowest stage of a plan, in ms, for other costs than its own."""
    laid_out, workload = lay_out(machine)
    split = [(stage.nodes, stage.devices, stage.recompute) for stage in plan.stages]
    return max(stage.load_ms for stage in price_split(costs, laid_out, workload, split, plan.model))


def find_regrets(measured: Costs, estimated: Costs) -> list[float]:
    """Return the regret of plans from estimated costs, as a share, on each of MACHINES."""
    found = []
    for machine in MACHINES:
        best, tried = (price(fxsplit.plan(costs, machine), measured, machine) for costs in (measured, estimated))
        found.append(tried / best - 1.0)
    return found
