"""The ten answers of a report: their figures are those of the plan, and an unknown one is said to be unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxsplit.report.page.story import NextBest, Story, Trial
from fxsplit.report.page.words import answer_all
from fxsplit.system.figures import format_bytes, format_ms, format_share
from tests.report.stories import make_story, slow_down


def answer(story: Story) -> dict[str, str]:
    """Return the answers by the last word but one of their questions."""
    keys = ("cut", "slowest", "why", "best", "step", "idle", "memory", "trials", "layer", "again")
    return {key: " ".join(a.sentences) for key, a in zip(keys, answer_all(story), strict=True)}


def test_every_question_has_an_answer_with_the_figures_of_the_plan() -> None:
    story = make_story()
    found, plan = answer(story), story.plan
    assert "is cut into 2 stages" in found["cut"] and "Stage 0 (device0) runs layers.0 to layers.1" in found["cut"]
    assert "Stage 0 (device0): it is busy for 17.0 ms with each microbatch of 2 rows." in found["slowest"]
    assert "The largest part of its computing is layers.0" in found["slowest"]
    assert "Cut 1, between stages 0 and 1: for each microbatch 1000 B go forward (relu_1)" in found["why"]
    assert "No other split has a faster slowest stage: that is proven" in found["best"]
    assert f"among all plans with cuts at {plan.n_states - 2} places" in found["best"]
    assert "4 microbatches keep the slowest stage busy for 68.0 ms of " in found["best"]
    assert story.simulation is not None and story.measured is not None
    step = story.simulation.step_ms
    assert f"Predicted: {format_ms(step)} for a batch of 4 microbatches of 2 rows" in found["step"]
    assert f"Measured: {format_ms(1.5 * step)}, 50.0 % more than predicted." in found["step"]
    assert f"{format_share(story.simulation.bubble)} of the predicted step (the bubble)" in found["idle"]
    assert "device1 is idle for" in found["idle"] and "because the pipeline fills" in found["idle"]
    assert "waiting until gradients of stage 1 are computed" in found["idle"]
    assert "Computing took 1.50 times as long as in the profile" in found["step"]
    assert "not pay" in found["step"], "one device is predicted to be faster than this"
    fullest = max(plan.stages, key=lambda stage: stage.memory_bytes)
    assert f"It needs at most {format_bytes(fullest.memory_bytes)} of 39.1 KiB" in found["memory"]
    assert found["memory"].startswith("Yes. The fullest is stage ")
    for change in ("One more device: step", "Twice the bandwidth: step", "of half the rows): step"):
        assert change in found["trials"]
    assert "if it were twice as fast" in found["layer"]
    assert "Save plan.json with the button" in found["again"]


def test_what_is_not_known_is_said() -> None:
    story = make_story()
    bare = Story(replace(story.plan, costs=None, machine=None), trials_left_out="nobody asked")
    found = answer(bare)
    assert found["cut"].startswith("The model is cut into 2 stages")
    assert "was not simulated" in found["step"] and "Measured: not here" in found["step"]
    assert "since the step was not simulated" in found["idle"]
    assert found["memory"].startswith("That cannot be said, since the memory of the devices is not known.")
    assert "That was not tried: nobody asked" in found["trials"]
    assert "not known without the profile" in found["layer"]
    assert "no lower bound was proven" in found["best"], "a changed plan is not proven"
    assert "was not searched" in answer(replace(story, next_best=()))["why"]


@pytest.mark.parametrize(
    ("best", "said"),
    [
        (NextBest(1, None), "With no cut at this place there is no plan."),
        (NextBest(1, 17.0), "Another place is as good"),
        (NextBest(1, 18.7), "the slowest stage of the best other plan takes 18.7 ms, 10.0 % more."),
        (NextBest(1, 15.3), "has a slowest stage of 15.3 ms, 10.0 % less."),
    ],
)
def test_the_next_best_cut(best: NextBest, said: str) -> None:
    assert said in answer(replace(make_story(), next_best=(best,)))["why"]


def test_the_places_next_to_a_cut() -> None:
    best = NextBest(1, 18.7, 18.7, 19.5, 21.0)
    said = answer(replace(make_story(), next_best=(best,)))["why"]
    assert (
        "The slowest stage takes 17.0 ms with the cut here, and 19.5 ms with the cut one operation earlier or " in said
    )
    assert "21.0 ms with the cut one operation later. With no cut here" in said
    assert "with the cut here" not in answer(replace(make_story(), next_best=(NextBest(1, 18.7),)))["why"]


def test_a_gap_and_too_little_memory() -> None:
    story = make_story()
    plan = replace(story.plan, lower_bound_ms=16.0).prove("bound")
    assert "At most 6.2 %: no slowest stage is below 16.0 ms" in answer(replace(story, plan=plan))["best"]
    assert plan.machine is not None
    small = replace(plan.machine, devices=tuple(replace(d, memory_bytes=1000.0) for d in plan.machine.devices))
    assert "No: stage 0 (device0) needs more" in answer(replace(story, plan=replace(plan, machine=small)))["memory"]


def test_the_best_of_all_trials_must_fit() -> None:
    base = Trial("what if", "nothing changed", 10.0, 100.0, 0.2)
    tight = Trial("what if", "schedule ZB-H1", 10.0, 50.0, 0.1, "needs more memory than there is")
    other = Trial("what if", "all stages recompute", 10.0, 80.0, 0.1)
    story = replace(make_story(), trials=(base, tight, other))
    assert (
        "The best of all that was tried is all stages recompute: step 80.0 ms, 20.0 % shorter"
        in answer(story)["trials"]
    )
    none = Trial("what if", "one more device", note="no plan fits")
    assert "One more device: no plan (no plan fits)." in answer(replace(story, trials=(base, none)))["trials"]


def test_a_pipeline_that_is_slower_than_one_device_is_said_to_be() -> None:
    story = make_story()
    assert story.measured is not None
    alone = story.plan.n_microbatches * story.plan.single_ms
    for factor, pays in ((0.95, True), (1.05, False)):
        measured = slow_down(story.measured, factor * alone / story.measured.length_ms)
        said = answer(replace(story, measured=measured))["step"]
        assert (f"That is longer than the {format_ms(alone)} predicted for one device" in said) != pays
        assert "Usual reasons: devices that share cores" in said


def test_a_plan_for_the_shortest_step_is_judged_by_its_step() -> None:
    story = make_story()
    plan = replace(story.plan, step_ms=90.0, step_lower_bound_ms=80.0).prove("bound")
    found = answer(replace(story, plan=plan))
    assert found["best"].startswith("At most 12.5 %: no step is below 80.0 ms")
    assert "the slowest stage busy for" not in found["best"]
    proven = answer(replace(story, plan=replace(plan, step_lower_bound_ms=90.0).prove("search")))
    assert proven["best"].startswith("No other plan has a shorter step: that is proven")
    assert "with which the step becomes shortest" in found["why"]
