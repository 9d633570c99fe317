"""The number of microbatches of one batch, chosen together with the plan, from profiles at several microbatch sizes.

The batch is constant: fewer microbatches have more rows. A number is planned for if it divides the batch into
microbatches of a measured size, or of a size between two measured ones. The bound is the least of all numbers' bounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from fxsplit.errors import InputError, NoFit
from fxsplit.ir.facts.compared import ComparedCount
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.costs.interpolate import check_one_model, interpolate_costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import price_single_device
from fxsplit.planner.solve import bound_by_work
from fxsplit.system.progress import track


class Size(NamedTuple):
    """A number of microbatches of the batch, with the costs of one microbatch.

    `between`: the rows of the two profiles that the costs are interpolated from; empty for measured costs.
    """

    n_microbatches: int
    costs: Costs
    between: tuple[int, ...] = ()


def list_sizes(profiles: Sequence[Costs], names: Sequence[str], n_microbatches: int) -> list[Size]:
    """Return every number of microbatches that the profiles tell the costs of, the fewest first.

    The batch has `n_microbatches` microbatches of the first profile's rows. Costs are interpolated only if the graph
    serves any number of rows. Raises ProfileError for profiles of several models; `names` are for that error.
    """
    check_one_model(profiles, names)
    known = {costs.rows: costs for costs in sorted(profiles, key=lambda costs: costs.rows)}
    measured, batch = list(known), profiles[0].rows * n_microbatches
    between = [] if any(costs.fixed_rows for costs in profiles) else range(measured[0], measured[-1] + 1)
    sizes = []
    for rows in sorted({*measured, *between}, reverse=True):
        if batch % rows:
            continue
        if rows in known:
            sizes.append(Size(batch // rows, known[rows]))
            continue
        at = bisect_left(measured, rows)
        ends = measured[at - 1], measured[at]
        sizes.append(Size(batch // rows, interpolate_costs(known[ends[0]], known[ends[1]], rows), ends))
    return sizes


def choose_count(sizes: Sequence[Size], machine: Machine, plan_for: Callable[[Costs, int], Plan]) -> Plan:
    """Return the plan with the shortest step over all numbers of microbatches, and one lower bound for all numbers.

    plan_for: returns the plan with the shortest step for costs and a number of microbatches, or raises NoFit. A number
    is left out if its work, shared by all devices, takes longer than a known step. Raises NoFit if no number fits.
    """
    best, reason = None, NoFit("there is no number of microbatches", proven=True)
    compared, proven = [], True
    for size in track(sorted(sizes, key=lambda size: _estimate(size, len(machine))), "numbers of microbatches"):
        step, low = None, size.n_microbatches * bound_by_work(size.costs, machine)
        if best is None or low < (best.step_ms or inf):
            try:
                plan = plan_for(size.costs, size.n_microbatches)
                step, low = plan.step_ms, plan.step_lower_bound_ms or 0.0
                if best is None or (step or inf) < (best.step_ms or inf):
                    best = plan
            except NoFit as error:
                reason, proven = error, proven and error.proven
                low = inf if error.proven else low
        single_ms = size.n_microbatches * price_single_device(size.costs, machine)
        compared.append(ComparedCount(size.n_microbatches, size.costs.rows, step, low, single_ms, size.between))
    if best is None or best.step_ms is None:
        counts = ", ".join(str(size.n_microbatches) for size in sizes)
        raise NoFit(f"no plan for {counts} microbatches: {reason}", reason.short_bytes, proven=proven) from reason
    return state_counts(best, compared)


def state_counts(plan: Plan, compared: Sequence[ComparedCount]) -> Plan:
    """Return a plan with the numbers of microbatches that it was chosen from, and the least of their lower bounds."""
    step = inf if plan.step_ms is None else plan.step_ms
    low = min(step, *(count.lower_bound_ms for count in compared))
    ordered = tuple(sorted(compared, key=lambda count: count.n_microbatches))
    return replace(plan, step_lower_bound_ms=low, compared_counts=ordered).prove("bound" if low < step else "search")


def check_several(count: int, n_microbatches: int | None, *, best: bool) -> int:
    """Return the number of microbatches of the first profile that a batch has.

    Raises InputError unless `count` profiles may be planned from: for the best plan, and for a known batch.
    """
    if count == 0:
        raise InputError("profile is an empty list: give a profile, or several of one model")
    if not best:
        raise InputError(
            "several profiles, of one model at several microbatch sizes, are for the best plan: give best=True too, or "
            "one profile"
        )
    if n_microbatches is None:
        raise InputError(
            "with several profiles, give n_microbatches= too: the batch has so many microbatches of the first profile"
        )
    return n_microbatches


def _estimate(size: Size, devices: int) -> float:
    """Return the step of a pipeline of equal stages under 1F1B, in ms: good numbers come first, and rule out others."""
    return size.costs.total_ms * (size.n_microbatches + devices - 1) / devices
