"""Why there is no plan, in words: which pins contradict each other, or which stage lacks how much memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fxsplit.errors import NoFit, PlanError
from fxsplit.ir.facts.antichains import Antichains
from fxsplit.ir.facts.machine import Machine
from fxsplit.ir.facts.price import format_bytes
from fxsplit.planner.clock import Clock, OutOfTime
from fxsplit.planner.problem import Problem
from fxsplit.planner.search import Found, minimise


def explain_misfit(
    problems: Sequence[Problem], chains: Antichains, machine: Machine, schedule: str, clock: Clock, *, complete: bool
) -> PlanError:
    """Return the error that says why no plan exists: contradictory pins, or how much memory is missing and where.

    `problems` are those of all numbers of stages that were tried. Each is solved again without memory limits: where
    that fails too, the pins are at fault. Else the chain that exceeds the memory by the fewest bytes is looked for.
    `complete` tells whether all plans were looked at that the options allow.
    """
    some = (
        ""
        if chains.complete
        else " among the states of one topological order; allow more states (augment{max_states=})"
    )
    if chains.complete and not complete:
        some = " that leaves only the last devices idle; leave those out that are of no use"
    tries: list[tuple[float, Problem, Found]] = []
    try:
        # Without memory limits only pins, and the number of stages, can rule a chain out.
        possible = [p for p in problems if minimise(p.without_memory(), chains, clock) is not None]
        for problem in possible:
            relaxed = problem.for_excess()
            found = minimise(relaxed, chains, clock)
            assert found is not None  # the chain that was found without memory is one here too
            tries.append((found.load, relaxed, found))
    except OutOfTime:
        return NoFit(
            f"no plan fits{some}; allow more time (partition{{time_limit=}}) to be told which stage is short of memory"
        )
    if not possible:
        # Among the states of one order alone, other states might still satisfy the pins.
        kind = PlanError if complete else NoFit
        return kind(
            f"no plan for {len(machine)} devices satisfies the pins{some}: some pinned node depends on one that is "
            "pinned to a later stage, or a stage would stay empty; pin fewer submodules or use fewer devices"
        )
    _, relaxed, found = min(tries, key=lambda attempt: attempt[0])
    loads = relaxed.loads(found.path)
    # Loads of the relaxed problem are bytes above the memory.
    worst = int(np.argmax(loads))
    # The replicas of a stage hold the same, so the first will do as an example.
    device = machine.devices[found.path[worst][1].devices[0]]
    # 1F1B holds the fewest microbatches of all schedules.
    earlier = "" if schedule == "1F1B" else "schedule='1F1B', "
    need = device.memory_bytes + loads[worst]
    return NoFit(
        f"no plan fits in memory{some}: even the best leaves stage {worst} of {len(loads)} on {device.name} short by "
        f"{format_bytes(loads[worst])} ({loads[worst]:.0f} bytes): "
        f"it needs {format_bytes(need)} of {format_bytes(device.memory_bytes)}; use "
        f"more devices, more and smaller microbatches, {earlier}or partition{{optimizer_factor=}} if your optimizer "
        "keeps less than Adam",
        short_bytes=float(loads[worst]),
    )
