"""Trials of a report: each equals the plan that fxsplit.plan makes for the change, and they end with their time."""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf

import pytest

import fxsplit
from fxsplit.api.report.trials import OutOfPatience, Trials, resize, scale_rows, speed_up, widen
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.report.page.story import Trial
from tests.report.plans import COSTS, make_plan

MACHINE = Machine.planned(2, bytes_per_s=1e6, memory_bytes=40_000.0)


def make_trials(plan: Plan | None = None) -> Trials:
    return Trials(plan or make_plan(), time.perf_counter() + 1000.0)


@pytest.fixture(scope="module")
def tried() -> dict[str, Trial]:
    return {f"{trial.group}: {trial.change}": trial for trial in make_trials().list_all()}


def expect(trial: Trial, plan: Plan) -> None:
    assert trial.bottleneck_ms == pytest.approx(plan.bottleneck_ms) and trial.note.find("no plan") < 0


def test_machines_are_those_that_plan_is_given(tried: dict[str, Trial]) -> None:
    expect(tried["what if: nothing changed"], make_plan())
    more = Machine.planned(3, bytes_per_s=1e6, memory_bytes=40_000.0)
    expect(tried["what if: one more device"], fxsplit.plan(COSTS, more, n_microbatches=4))
    fast = Machine.planned(2, bytes_per_s=2e6, memory_bytes=40_000.0)
    expect(tried["what if: twice the bandwidth"], fxsplit.plan(COSTS, fast, n_microbatches=4))
    expect(tried["grid: 2 devices, 2 x bandwidth"], fxsplit.plan(COSTS, fast, n_microbatches=4))
    assert tried["grid: 2 devices, links as they are"].place == ("2 devices", "links as they are")


def test_half_the_microbatch_is_the_same_batch_in_twice_as_many(tried: dict[str, Trial]) -> None:
    half = tried["what if: half the microbatch"]
    expect(half, fxsplit.plan(scale_rows(COSTS, 0.5), MACHINE, n_microbatches=8))
    assert "8 microbatches" in half.note and half.step_ms is not None
    assert half.step_ms < (tried["what if: nothing changed"].step_ms or inf), "the bubble is smaller"
    assert tried["what if: twice the microbatch"].bubble is not None


def test_a_faster_layer_and_other_schedules(tried: dict[str, Trial]) -> None:
    layers = {change: trial for change, trial in tried.items() if change.startswith("layer: ")}
    trial = layers["layer: layers.*"]
    faster = speed_up(COSTS, {n.name for n in COSTS.nodes if n.name != "head"}, 2.0)
    expect(trial, fxsplit.plan(faster, MACHINE, n_microbatches=4))
    assert "6 nodes" in trial.note and "* stands for every number" in trial.note
    assert tried["what if: schedule ZB-H1"].step_ms is not None and "what if: schedule 1F1B" not in tried


def test_trials_end_with_their_time() -> None:
    over = Trials(make_plan(), time.perf_counter() - 1.0)
    with pytest.raises(OutOfPatience):
        next(over.list_all())
    with pytest.raises(OutOfPatience):
        next(over.find_next_best())


def test_the_next_best_is_what_explain_finds() -> None:
    (best,) = make_trials().find_next_best()
    cut = frozenset(make_plan().stages[0].nodes)
    found = {
        fxsplit.plan(COSTS, MACHINE, n_microbatches=4, pins={name: stage}).bottleneck_ms
        for name, stage in (("linear_1", 1), ("relu_1", 1), ("linear_2", 0))
    }
    assert cut == {"linear_0", "relu_0", "linear_1", "relu_1"}
    assert best.number == 1 and best.bottleneck_ms == pytest.approx(min(found))


def test_the_places_next_to_a_cut_are_priced_as_plans() -> None:
    (best,) = make_trials().find_next_best()
    names = [n.name for n in COSTS.nodes]
    assert all(n.forward_ms > 0 for n in COSTS.nodes)
    for kept, found in ((3, best.earlier_ms), (5, best.later_ms)):
        pins = {name: int(i >= kept) for i, name in enumerate(names)}
        assert found == pytest.approx(fxsplit.plan(COSTS, MACHINE, n_microbatches=4, pins=pins).bottleneck_ms)
    assert make_trials().shift_cut(1, later=False) == best.earlier_ms
    # A stage of one operation would compute nothing without it.
    pins = {name: int(i >= 1) for i, name in enumerate(names)}
    alone = make_trials(fxsplit.plan(COSTS, MACHINE, n_microbatches=4, pins=pins))
    assert alone.shift_cut(1, later=False) is None
    assert alone.shift_cut(1, later=True) is not None


def test_a_plan_for_the_shortest_step_is_compared_with_others_of_its_kind() -> None:
    plan = fxsplit.plan(COSTS, MACHINE, n_microbatches=4, best=True)
    trials = make_trials(plan)
    assert [*trials.find_next_best()] == []
    base = next(trials.list_all())
    assert base.change == "nothing changed"
    assert base.step_ms == pytest.approx(plan.step_ms)


def test_machines_grow_and_shrink() -> None:
    machine = Machine(
        (Device("a", memory_bytes=5.0), Device("b", speed=2.0, bytes_per_s=8.0)), (3.0,), latencies_ms=(0.5,)
    )
    more = resize(machine, 4)
    assert more is not None and more.links == (3.0, 3.0, 3.0) and more.latencies_ms == (0.5, 0.5, 0.5)
    assert [d.speed for d in more.devices] == [1.0, 2.0, 2.0, 2.0]
    assert resize(machine, 0) is None and len(resize(machine, 1) or machine) == 1
    assert widen(machine, 2.0).links == (6.0,) and widen(machine, 2.0).devices[1].bytes_per_s == 16.0


def test_scaled_costs_keep_their_weights() -> None:
    half = scale_rows(COSTS, 0.5)
    assert half.nodes[0].forward_ms == COSTS.nodes[0].forward_ms / 2
    assert half.nodes[0].parameter_bytes == COSTS.nodes[0].parameter_bytes
    assert half.inputs[0].output_bytes == 200.0
    known = replace(COSTS.nodes[0], weight_ms=1.0)
    assert scale_rows(replace(COSTS, nodes=(known, *COSTS.nodes[1:])), 0.5).nodes[0].weight_ms == 0.5


def test_several_stages_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fxsplit.plan(COSTS, MACHINE, schedule="Interleaved1F1B", n_microbatches=4)
    tried = {trial.change: trial for trial in make_trials(plan).list_all()}
    expect(tried["nothing changed"], plan)
    assert tried["one device fewer"].step_ms is not None or tried["one device fewer"].note
