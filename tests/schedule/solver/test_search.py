"""The search beside an exact referee: its bound is never above the optimum, nor its step below, and both are true."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit.errors import ScheduleError
from fxsplit.schedule import RUNNABLE, SearchResult, Times, generate, search, simulate, verify
from fxsplit.schedule.homes import line
from fxsplit.schedule.kernels.instance import Instance, make_instance
from fxsplit.schedule.solver.annealing import DEEP, Candidate, Setting, improve
from fxsplit.schedule.solver.search import Placement, fits, warm_up
from tests.support.exact_schedules import (
    CLOSE,
    Pipeline,
    draw,
    find_optimum,
    find_peaks,
    read_orders,
    run_orders,
    try_all_orders,
)

PLACEMENTS = ("line", "v", "loop")


def run(x: Pipeline, **options: Any) -> SearchResult:
    """Search for a schedule of a pipeline."""
    given: dict[str, Any] = {
        "n_devices": x.p,
        "n_microbatches": x.n,
        "stages_per_device": x.n_stages // x.p,
        "placement": "v" if x.placement == "v" else "loop",
        "memory": x.memory,
        "kept_for_weights": x.kept,
        "held": x.held,
        "time_limit_s": 0.2,
    }
    return search(x.state_times(), **given | options)


def check(x: Pipeline, found: SearchResult) -> None:
    """Check what holds for every result, however short the search was."""
    times = x.state_times()
    verify(found.schedule)
    assert found.schedule.homes == tuple((d,) for d in x.devices)
    assert simulate(found.schedule, times).step_ms == found.step_ms
    assert 0 <= found.gap < 1 and found.bound_ms <= found.step_ms
    peaks = find_peaks(x, found.schedule)
    assert all(peak <= most + 1e-9 for peak, most in zip(peaks, x.memory, strict=True))
    for name in RUNNABLE:
        try:
            named = generate(name, x.p, x.n, x.n_stages // x.p, times)
        except ScheduleError:
            continue
        if named.homes == found.schedule.homes and fits_memory(x, find_peaks(x, named)):
            assert found.step_ms <= simulate(named, times).step_ms, name


def fits_memory(x: Pipeline, peaks: list[float]) -> bool:
    return all(peak <= most + 1e-9 for peak, most in zip(peaks, x.memory, strict=True))


def compare(x: Pipeline, found: SearchResult) -> None:
    """Compare a result with the exact optimum. The referee begins above the step, and must find one as short."""
    optimum = find_optimum(x, 1.02 * found.step_ms)
    assert found.bound_ms <= optimum * (1 + CLOSE)
    assert found.step_ms >= optimum * (1 - CLOSE)
    if found.gap == 0:
        assert found.step_ms <= optimum * (1 + CLOSE)
    if all(action.op != "B" for row in found.schedule.actions for action in row):
        assert run_orders(x, read_orders(found.schedule)) == pytest.approx(found.step_ms)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("seed", range(20))
def test_bounds_and_steps_enclose_the_optimum(placement: str, seed: int) -> None:
    x = draw(Random(f"{placement}{seed}"), placement, 3)
    found = run(x)
    check(x, found)
    compare(x, found)


@pytest.mark.long
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("part", range(10))
def test_bounds_and_steps_enclose_the_optimum_of_many(placement: str, part: int) -> None:
    for seed in range(20 * part, 20 * part + 20):
        x = draw(Random(f"many {placement}{seed}"), placement)
        found = run(x)
        check(x, found)
        compare(x, found)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_referee_finds_the_best_of_all_orders(placement: str) -> None:
    tried = 0
    for seed in range(12):
        x = draw(Random(f"all {placement}{seed}"), placement, 2)
        if x.p == 2 and placement == "line":
            best = try_all_orders(x)
            tried += 1
        elif placement != "line":
            # One microbatch on two devices: what fits of all orders of two stages is still few.
            x = replace(x, n=1)
            best = try_all_orders(x)
            tried += 1
        else:
            continue
        assert find_optimum(x, 1.3 * best) == pytest.approx(best, rel=1e-9)
    assert tried > 3


@pytest.mark.parametrize(
    ("placement", "seed"), [("v", 3), ("v", 79), ("v", 85), ("v", 88), ("v", 143), ("loop", 45), ("loop", 86)]
)
def test_weights_of_either_chunk_may_go_first(placement: str, seed: int) -> None:
    """In each of these, every schedule with the oldest W first is slower than the optimum."""
    x = draw(Random(f"{placement}{seed}"), placement)
    found = run(x, time_limit_s=60.0)
    check(x, found)
    assert found.gap == pytest.approx(0, abs=1e-6)
    assert found.step_ms <= find_optimum(x, found.step_ms) * (1 + CLOSE)


@pytest.mark.parametrize(("placement", "seed"), [("v", 68), ("v", 187), ("loop", 30), ("loop", 72), ("loop", 220)])
def test_small_instances_do_not_get_stuck(placement: str, seed: int) -> None:
    """Annealings with the temperature of large instances do not leave a step 2 to 5 % longer, even in many turns."""
    x = draw(Random(f"{placement}{seed}"), placement)
    assert run(x, time_limit_s=60.0).gap == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_same_seed_finds_the_same(placement: str) -> None:
    proven = 0
    for seed in range(12):
        x = draw(Random(f"same {placement}{seed}"), placement, 2)
        first, again = run(x, seed=5, time_limit_s=20.0), run(x, seed=5, time_limit_s=20.0)
        # A search that the time limit ends may differ.
        if first.gap < 1e-6:
            proven += 1
            assert first == again
    assert proven > 6


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(PLACEMENTS), st.integers(0, 10**6))
def test_results_are_legal(placement: str, seed: int) -> None:
    x = draw(Random(seed), placement)
    check(x, run(x, time_limit_s=0.05))


@pytest.mark.parametrize(("each", "placement"), [(1, "v"), (2, "v"), (2, "loop")])
def test_one_device_and_one_microbatch(each: int, placement: Placement) -> None:
    one = search(Times.unit(each), n_devices=1, n_microbatches=3, stages_per_device=each, placement=placement)
    assert (one.step_ms, one.bound_ms, one.gap) == (9.0 * each, 9.0 * each, 0.0)
    # Down three devices and back, and the last W.
    single = search(Times.unit(3 * each), n_devices=3, n_microbatches=1, stages_per_device=each, placement=placement)
    assert single.step_ms == single.bound_ms == 6 * each + 1
    assert single.schedule.name == "search"


def test_zero_times_take_no_time() -> None:
    found = search(Times([0.0] * 2, [0.0] * 2), n_devices=2, n_microbatches=3)
    assert (found.step_ms, found.bound_ms, found.gap) == (0.0, 0.0, 0.0)
    assert search(Times([1.0] * 2, [1.0] * 2, weight_ms=[1.0] * 2), n_devices=2, n_microbatches=2).gap == 0


def test_stages_that_hold_nothing_are_free() -> None:
    """A pipeline whose first stages keep no activations, as with recomputation of everything."""
    for held in ([0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0], [0.5, 0.0, 1.0, 1.0]):
        options: dict[str, Any] = {"held": held, "memory": 2.0, "stages_per_device": 2, "time_limit_s": 0.2}
        assert search(Times.unit(4), n_devices=2, n_microbatches=4, **options).gap < 0.5
    line_ = search(Times.unit(2), n_devices=2, n_microbatches=3, held=[0, 1], memory=1, time_limit_s=0.2)
    assert line_.bound_ms <= line_.step_ms < 18


def test_memory_is_counted_from_its_parts() -> None:
    """Two microbatches fit only if the input gradient frees its part before the W."""
    times = Times.unit(2)
    steps = [
        search(times, n_devices=2, n_microbatches=4, memory=memory, kept_for_weights=kept).step_ms
        for memory, kept in ((1, 1.0), (1.5, 0.5), (2, 1.0), (None, 1.0))
    ]
    assert steps == sorted(steps, reverse=True)
    one_by_one = search(times, n_devices=2, n_microbatches=4, memory=1)
    assert one_by_one.gap == pytest.approx(0, abs=1e-6)
    one = make_instance(line(2), 4, times, memory=1)
    assert fits(one, one_by_one.schedule)
    # 1F1B holds two microbatches on the first device, and one on the last.
    assert not fits(one, generate("1F1B", 2, 4))
    assert fits(make_instance(line(2), 4, times, memory=[2, 1]), generate("1F1B", 2, 4))
    assert not fits(make_instance(line(2), 4, times, memory=[2, 1]), generate("GPipe", 2, 4))


def test_with_little_memory_orders_of_two_kinds_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are annealed if their steps are close, and the better one goes on."""
    asked: list[tuple[float, float, Setting]] = []

    class Seen(Exception):
        """Ends a search, which would go on until its time limit."""

    def note(one: Instance, start: Candidate, goal: float, setting: Setting, seed: int, deadline: float) -> Candidate:
        found = improve(one, start, goal, setting._replace(length=1, fewest=30), seed, deadline)
        asked.append((start.step, found.step, setting))
        if len(asked) == 3:
            raise Seen
        return found

    warm_up()
    monkeypatch.setattr("fxsplit.schedule.solver.search.improve", note)
    options: dict[str, Any] = {"n_devices": 8, "n_microbatches": 24, "stages_per_device": 2, "time_limit_s": 60.0}
    times = Times([9.0] * 16, [13.5] * 16, [0.3] * 16, [0.3] * 16, weight_ms=[4.5] * 16)
    for memory, rival, kinds in ((4, 1.5, 2), (4, 1.0, 1), (8, 1.5, 1)):
        asked.clear()
        monkeypatch.setattr("fxsplit.schedule.solver.search.RIVAL", rival)
        with pytest.raises(Seen):
            search(times, memory=memory, **options)
        deep = [setting.by_gap and setting.side == DEEP.side for _, _, setting in asked[:2]]
        assert deep == [kinds == 2] * 2
        # Each annealing begins from the best so far.
        best = min(found for _, found, _ in asked[:kinds])
        if kinds == 2:
            assert asked[0][0] != asked[1][0]
            assert asked[2][0] == best


GOOD: dict[str, Any] = {"n_devices": 2, "n_microbatches": 2, "time_limit_s": 0.1}


@pytest.mark.parametrize(
    ("what", "value"),
    [
        *(("n_devices", value) for value in (0, -1, 1.5, "2", None)),
        *(("n_microbatches", value) for value in (0, -2, 2.5, "3", None, 10**12)),
        *(("stages_per_device", value) for value in (0, 3, "1", None)),
        *(("placement", value) for value in ("V", None, 3)),
        *(("memory", value) for value in (0.5, 0, -1, nan, "x", [1, 2, 3], [1, "a"], [], [2, 0.5])),
        *(("kept_for_weights", value) for value in (-0.1, 1.1, nan, inf, "x", [1, 1, 1])),
        *(("held", value) for value in ([1], [-1, 1], [nan, 1], [inf, 1], "xx", 5)),
        *(("time_limit_s", value) for value in (0, -1, nan, "1")),
        *(("seed", value) for value in (1.5, "a", None)),
    ],
)
def test_bad_options_are_refused_by_name(what: str, value: Any) -> None:
    with pytest.raises(ScheduleError, match=rf"^search: .*({what}|one microbatch needs)"):
        search(Times.unit(2), **GOOD | {what: value})


@pytest.mark.parametrize(
    "what", ["forward_ms", "backward_ms", "weight_ms", "forward_hop_ms", "backward_hop_ms", "latency_ms"]
)
@pytest.mark.parametrize("bad", [-1.0, nan, inf, "x", None])
def test_bad_times_are_refused_by_name(what: str, bad: Any) -> None:
    times: dict[str, Any] = {"forward_ms": [1.0, 1.0], "backward_ms": [2.0, 2.0]}
    with pytest.raises(ScheduleError, match=f"^search: {what}"):
        search(Times(**times | {what: [1.0, bad]}), **GOOD)


def test_times_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match="2 stages, and forward_ms has 3"):
        search(Times.unit(3), **GOOD)
    with pytest.raises(ScheduleError, match="forward_hop_ms has 3 numbers: give 2"):
        search(Times([1.0] * 2, [2.0] * 2, [0.0] * 3), **GOOD)
    with pytest.raises(ScheduleError, match=r"weight_ms=3.0 of stage 1 is more than its backward_ms=2.0"):
        search(Times([1.0] * 2, [2.0] * 2, weight_ms=[1.0, 3.0]), **GOOD)
