"""Plans for the shortest step on several numbers of devices: their table, how each runs, and the knee.

The *knee* is the last number of devices whose last device brings more than a share of what the first device brought.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from fxsplit.ir.facts.plan import Plan
from fxsplit.schedule.choose_schedule import find_nearest_named
from fxsplit.schedule.of_plan import read_times, restore_schedule
from fxsplit.schedule.simulation.simulate import simulate
from fxsplit.system.figures import format_bytes, format_count
from fxsplit.system.shown import Table

Plans = Sequence[tuple[int | None, Plan]]
"""Numbers of devices in order, each with its plan; None for the devices of a machine."""
KNEE = 0.5
"""The default share of the first device's speed that a device must bring to count."""


def tabulate_steps(plans: Plans) -> Table:
    """Return a row for each number of devices."""
    # The number of microbatches and their rows, with a tilde if the times are interpolated.
    chosen = any(plan.compared_counts for _, plan in plans)
    rows = []
    for count, plan in plans:
        batch = f"{'~' * bool(plan.interpolated_between)}{plan.n_microbatches} x {plan.rows}"
        figures = f"{plan.step_ms or 0.0:.4f}", f"{plan.step_speedup or inf:.2f}", plan.standing.removeprefix("gap ")
        # With two stages on a device the plan's machine has each device twice.
        homes = plan.machine.homes if plan.machine is not None else ()
        used = len({d for home in homes or (stage.devices for stage in plan.stages) for d in home})
        rows.append((count, *figures, len(plan.stages), used, *[batch] * chosen, *describe_run(plan)))
    heads = (">devices", ">step ms", ">speed-up", ">gap", ">stages", ">in use", *[">batch"] * chosen)
    return Table((*heads, ">idle", ">memory", "order"), rows)


def describe_run(plan: Plan) -> tuple[str, str, str]:
    """Return the idle share of a step, the memory of the fullest device and its limit, and the order of work.

    The order is that of a schedule by name, or a searched one with the share by which the fastest schedule by name
    takes longer.
    """
    schedule = restore_schedule(plan)
    idle = simulate(schedule, read_times(plan, schedule)).bubble
    fullest = max(plan.stages, key=lambda stage: stage.memory_bytes)
    limit = inf if plan.machine is None else fullest.find_limit(plan.machine)
    memory = f"{format_bytes(fullest.memory_bytes)}{'' if limit == inf else f' of {format_bytes(limit)}'}"
    order, nearest = plan.schedule, find_nearest_named(plan)
    if nearest is not None:
        name, longer = nearest
        order = f"{plan.schedule}, {name} +{100 * longer:.1f} %" if longer else f"as {name}"
    return f"{100 * idle:.0f} %", memory, order


def find_last_worthwhile(plans: Plans, share: float) -> int:
    """Return the last number of devices whose last device brings more than `share` of what the first one brought.

    The first device brings a speed-up of 1. If the range begins later, its first devices bring equal parts.
    """
    knee, before, known = plans[0][0] or 1, 0.0, 0
    for count, plan in plans:
        number, faster = count or 1, plan.step_speedup or 0.0
        if (faster - before) / (number - known) > share:
            knee = number
        before, known = faster, number
    return knee


def explain_knee(plans: Plans, share: float) -> str:
    """Return a line that names the knee."""
    knee = find_last_worthwhile(plans, share)
    if knee == plans[-1][0]:
        return f"no knee up to {knee} devices: the last one brings more than {share:g} of what the first did"
    faster = next(plan.step_speedup or 0.0 for count, plan in plans if count == knee)
    return (
        f"knee at {format_count(knee, 'device')}, speed-up {faster:.2f}: no later one brings more than {share:g} of "
        "what the first did"
    )
