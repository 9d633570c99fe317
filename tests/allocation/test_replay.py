"""Replays: figures by hand, losses that add up, and the exact policy beside the others on made traces."""

from __future__ import annotations

from typing import Any

import pytest

from bench.allocation import make_jobs, make_trace
from fxsplit.allocation.job import Job
from fxsplit.allocation.replay import CAUSES, replay
from fxsplit.api.allocate import Horizon
from fxsplit.errors import InputError
from tests.support.refusals import refused

EVENTS = [(0.0, 2), (10.0, 1), (30.0, 2), (40.0, 0)]


def test_one_job_by_hand() -> None:
    """2, 1 and 2 devices for 10, 20 and 10 s: 60 samples, of which a lost device costs 3 x 2 and a new one 1 x 1."""
    played = replay([Job("a", [1.0, 2.0], up_s=1.0, down_s=3.0)], EVENTS, horizon_s=100.0, policies=["exact"])
    one = played.outcomes["exact"]
    assert (played.mean_devices, played.dedicated_rate) == (1.5, 1.5)
    assert one.samples == (0.0, 20.0, 34.0, 53.0) and one.utilisation == pytest.approx(53 / 60)
    assert list(one.losses.values()) == pytest.approx([6 / 60, 1 / 60, 0.0, 0.0])
    assert (one.moves, one.preemptions) == (2, 1)  # the first move is the start


def test_a_short_horizon_leaves_a_device_idle() -> None:
    job = Job("a", [1.0, 2.0], up_s=1.0, down_s=3.0)
    one = replay([job], EVENTS, horizon_s=0.5, policies=["exact"]).outcomes["exact"]
    assert list(one.losses.values()) == pytest.approx([6 / 60, 0.0, 10 / 60, 0.0])


def test_a_rate_that_bends_loses_by_devices_that_change() -> None:
    """Rates of 4 and 6: on 2, 1 and 2 devices 200 samples, and on a mean of 1.5 devices 5 a second."""
    played = replay([Job("a", [4.0, 6.0])], EVENTS, horizon_s=1.0, policies=["exact", "equal"])
    assert played.dedicated_rate == 5.0
    for one in played.outcomes.values():
        assert one.losses == {**dict.fromkeys(CAUSES, 0.0), "concavity": pytest.approx(1 - 200 / 200)}
    played = replay([Job("a", [4.0, 6.0])], [(0.0, 2), (10.0, 0), (20.0, 2)], horizon_s=1.0, policies=["exact"])
    assert played.outcomes["exact"].losses["concavity"] == pytest.approx(1 - 60 / 80)


def test_a_job_below_its_least_ends() -> None:
    """It pays for the lost device, and then for the end of its work on the other one."""
    job = Job("a", [1.0, 5.0], least=2, down_s=2.0)
    one = replay([job], [(0.0, 2), (10.0, 1), (20.0, 1)], horizon_s=9.0, policies=["exact"]).outcomes["exact"]
    assert one.samples == (0.0, 50.0, 50.0 - 2.0 * 5.0 - 2.0 * 1.0)


def test_losses_add_up_and_a_replay_repeats() -> None:
    events = make_trace(1, hours=1.0)
    horizons: tuple[Horizon, ...] = (60.0, "auto")
    for horizon_s in horizons:
        played = replay(make_jobs(), events, horizon_s=horizon_s)
        for one in played.outcomes.values():
            assert one.utilisation + sum(one.losses.values()) == pytest.approx(1.0, abs=1e-12)
        again = replay(make_jobs(), events, horizon_s=horizon_s)
        assert again == played
    assert replay(make_jobs(), events, horizon_s="auto", seed=1) != played


def compare_policies(seeds: range, hours: float) -> None:
    for seed in seeds:
        outcomes = replay(make_jobs(), make_trace(seed, hours), horizon_s="auto").outcomes
        best = max(one.utilisation for one in outcomes.values())
        assert outcomes["exact"].utilisation == best, (seed, {n: o.utilisation for n, o in outcomes.items()})


def test_no_policy_is_above_the_exact_one() -> None:
    compare_policies(range(3), hours=2.0)


@pytest.mark.long
def test_no_policy_is_above_the_exact_one_on_twenty_traces() -> None:
    compare_policies(range(20), hours=6.0)


def test_the_best_horizon_is_neither_short_nor_long_and_auto_is_close_to_it() -> None:
    events = make_trace(1, hours=3.0)

    def judge(horizon_s: Any) -> float:
        return replay(make_jobs(), events, horizon_s=horizon_s, policies=["exact"]).outcomes["exact"].utilisation

    short, middle, long = map(judge, (10.0, 60.0, 600.0))
    assert middle > max(short, long) and judge("auto") > middle - 0.03


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"events": [(0.0, 1), (5.0, 1), (4.0, 1)]}, "event 3 has the time 4.0 s: give .* in rising order"),
        ({"events": [(0.0, 1), (float("nan"), 1)]}, "event 2 has the time nan s"),
        ({"events": [(0.0, 1), (5.0, -1)]}, "event 2 has -1 devices: give a whole number"),
        ({"events": [(0.0, 1), (5.0, 1.5)]}, "event 2 has 1.5 devices"),
        ({"events": [(0.0, 1)]}, "there are 1 events, which take no time: the last one states the end"),
        ({"events": []}, "there are 0 events"),
        ({"events": [(0.0, 0), (5.0, 9)]}, "the mean number of idle devices is 0.00: no job works on so few"),
        ({"horizon_s": 0.0}, "horizon_s=0.0: give seconds, .* or auto"),
        ({"horizon_s": "automatic"}, "horizon_s='automatic': give seconds"),
        ({"policies": ["equals"]}, "policy 'equals': known are exact, .*did you mean 'equal'"),
        ({"jobs": []}, "give at least one Job"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], message: str) -> None:
    known: dict[str, Any] = {"jobs": [Job("a", [1.0])], "events": EVENTS, "horizon_s": 1.0}
    with refused(InputError, message):
        replay(**known | given)
