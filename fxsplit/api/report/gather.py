"""Gather the story of a plan, the contents of a report: its simulated step, the places for cuts, and trials.

A *trial* is the best plan after one change, such as one more device.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np

from fxsplit.api.report.trials import OutOfPatience, Trials
from fxsplit.errors import FxsplitError
from fxsplit.ir.facts.plan import Plan
from fxsplit.report.page.story import CutCurve, NextBest, PassRow, Story, Trial
from fxsplit.report.pictures.plan import simulate_plan
from fxsplit.schedule.generators.catalogue import INFERENCE
from fxsplit.schedule.of_plan import name_devices, name_places, read_footprints
from fxsplit.schedule.simulation.memory import trace_memory
from fxsplit.schedule.simulation.timeline import Timeline
from fxsplit.system.figures import replace_infinite
from fxsplit.system.progress import phase

SECONDS = 20.0
"""The default time for trials."""
MOST_PLACES = 1500
"""The most places for a cut that a report shows."""


def gather_story(
    plan: Plan,
    *,
    model: str = "",
    measured: Timeline | None = None,
    passes: Sequence[PassRow] = (),
    notes: dict[str, str] | None = None,
    commands: Sequence[str] = (),
    plan_json: dict[str, Any] | None = None,
    seconds: float = SECONDS,
) -> Story:
    """Return the story of a plan; trials take at most about `seconds`, and none are made without costs and machine."""
    story = Story(
        plan,
        model,
        measured=measured,
        passes=tuple(passes),
        notes=notes or {},
        commands=tuple(commands),
        plan_json=json.dumps(replace_infinite(plan_json or {}), allow_nan=False),
        versions=f"fxsplit {version('fxsplit')}",
    )
    simulation = simulate_plan(plan)
    if simulation is not None:
        schedule = simulation.schedule
        # Memory is traced from forwards to their backwards, and inference has none.
        memory = () if plan.schedule == INFERENCE else trace_memory(simulation, read_footprints(plan))
        timeline = Timeline.of(simulation, name_devices(plan, schedule), memory, name_places(plan, schedule))
        title = f"{schedule.name}, predicted{plan.reliability}"
        story = replace(story, simulation=simulation, predicted=replace(timeline, title=title))
    if plan.costs is None or plan.machine is None:
        return replace(story, trials_left_out="the costs or the machine of the plan are not known")
    trials = Trials(plan, time.perf_counter() + seconds)
    with phase("trying other plans"):
        return _add_trials(story, trials)


def _add_trials(story: Story, trials: Trials) -> Story:
    """Return the story with the places for cuts, the next best cuts, and trials, as far as the time allows."""
    next_best: list[NextBest] = []
    made: list[Trial] = []
    left_out = ""
    try:
        story = replace(story, curve=list_places(trials))
        for found in trials.find_next_best():
            next_best.append(found)
        for trial in trials.list_all():
            made.append(trial)
    except OutOfPatience:
        left_out = "the time for trials was over: give more of it (--seconds, or seconds=)"
    except FxsplitError as error:
        left_out = f"trials ended: {error}"
    return replace(story, next_best=tuple(next_best), trials=tuple(made), trials_left_out=left_out)


def list_places(trials: Trials) -> CutCurve:
    """Return the places where the graph can be cut; if there are many, the ones with the fewest bytes."""
    assert trials.plan.machine is not None
    _, states = trials.planner.lattice(trials.plan.machine)
    work = states.column("forward_ms") + states.column("backward_ms")
    sent = states.column("sent_bytes")
    share = work / (float(work.max()) or 1.0)
    count = len(states)
    kept = np.arange(count)
    if count > MOST_PLACES:
        # The fewest bytes in each of many narrow columns: these are the cuts that a plan would take.
        column = np.minimum((share * MOST_PLACES).astype(np.int64), MOST_PLACES - 1)
        order = np.lexsort((sent, column))
        first = np.concatenate([[True], column[order][1:] != column[order][:-1]])
        kept = np.sort(order[first])
    # The first state is before all nodes, and the last one after them: no cut lies there.
    inner = kept[(share[kept] > 0) & (share[kept] < 1)]
    return CutCurve(tuple(map(float, share[inner])), tuple(map(float, sent[inner])), count)
