"""The story of a plan: its step, its places for cuts, and what is missing for want of time or of a profile."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest

import fxsplit
from fxsplit.api.report import gather
from fxsplit.api.report.gather import gather_story
from fxsplit.ir.facts.given.machine import Machine
from tests.report.plans import COSTS, make_plan
from tests.report.stories import make_costs


def test_a_story_has_the_step_and_the_places() -> None:
    story = gather_story(make_plan(), model="Net", plan_json={"lower_bound": inf})
    assert story.simulation is not None and story.predicted is not None
    assert story.predicted.length_ms == story.simulation.step_ms and story.predicted.title == "1F1B, predicted"
    assert story.trials_left_out == "" and len(story.next_best) == 1
    assert story.curve is not None and story.curve.n_places == make_plan().n_states
    work = [n.forward_ms + n.backward_ms for n in COSTS.nodes]
    shares = [sum(work[:i]) / sum(work) for i in range(1, len(work))]
    assert sorted(story.curve.shares) == pytest.approx(shares), "a chain has one place after each node"
    assert json.loads(story.plan_json) == {"lower_bound": None}, "JSON has no infinity"


def test_many_places_are_thinned_to_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "MOST_PLACES", 10)
    plan = fxsplit.plan(make_costs(200), Machine.planned(2))
    story = gather_story(plan, seconds=1000.0)
    assert story.curve is not None and len(story.curve.shares) <= 10 < story.curve.n_places


def test_without_time_or_profile_trials_are_missing() -> None:
    assert "time for trials was over" in gather_story(make_plan(), seconds=0.0).trials_left_out
    bare = gather_story(replace(make_plan(), costs=None))
    assert bare.trials == () and "not known" in bare.trials_left_out and bare.simulation is not None


def test_inference_has_no_memory_over_time() -> None:
    plan = fxsplit.plan(COSTS, 2, inference=True)
    story = gather_story(plan, seconds=1000.0)
    assert story.predicted is not None and story.predicted.memory == ()
    assert story.trials and not any(t.change.startswith("schedule") for t in story.trials)
