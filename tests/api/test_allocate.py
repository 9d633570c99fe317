"""allocate() and replay(): files, and curves that are planned from profiles."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

import fxsplit
from fxsplit.api.allocate import plan_curve
from fxsplit.errors import InputError
from tests.cli.test_plan import chain
from tests.support.refusals import refused


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    chain([4, 3, 2, 1, 2, 3], kept_bytes=10, parameter_bytes=7).save(path)
    return path


def test_the_curve_of_a_profile_is_that_of_its_best_plans_at_a_constant_batch(profile: Path) -> None:
    job = fxsplit.Job("a", profile=profile, most=2, n_microbatches=6)
    slow = fxsplit.Device("device", bytes_per_s=1e4)
    rates = []
    for names in (["d"], ["d", "e"]):
        machine = fxsplit.Machine(tuple(replace(slow, name=name) for name in names), (inf,) * (len(names) - 1))
        plan = fxsplit.plan(profile, machine, best=True, n_microbatches=6)
        assert plan.step_ms and plan.n_microbatches == 6
        rates.append(1e3 * 6 * plan.rows / plan.step_ms)
    found = fxsplit.allocate([job, fxsplit.Job("b", [0.1])], 4, horizon_s=10.0, device=slow)
    assert found.jobs[0].curve == pytest.approx([rates[0], max(rates)])
    assert max(rates) > 1.2 * rates[0] and found.counts == {"a": 2, "b": 1}


def test_devices_without_a_plan_that_fits_have_rate_0(profile: Path) -> None:
    job = plan_curve(fxsplit.Job("a", profile=profile, most=1), fxsplit.Device("device", memory_bytes=1.0))
    assert job.curve == (0.0,) and job.profile is None


def test_a_file_states_jobs_and_horizon(profile: Path, tmp_path: Path) -> None:
    """Profiles lie beside the file."""
    path = tmp_path / "jobs.toml"
    path.write_text(f"horizon_s = 30\n[[jobs]]\nname = 'a'\nprofile = '{profile.name}'\nmost = 1\n")
    found = fxsplit.allocate(path, 5)
    assert found.counts == {"a": 1} and found.objective == pytest.approx(30.0 * found.jobs[0].curve[0])


def test_events_are_read_from_a_file_and_a_stated_horizon_comes_before_the_files(tmp_path: Path) -> None:
    path, events = tmp_path / "jobs.toml", tmp_path / "events.csv"
    path.write_text("horizon_s = 30\n[[jobs]]\nname = 'a'\ncurve = [1.0, 2.0]\nup_s = 40\n")
    events.write_text("time_s,devices\n0,1\n60,2\n90,2\n")
    jobs, rows = [fxsplit.Job("a", [1.0, 2.0], up_s=40.0)], [(0.0, 1), (60.0, 2), (90.0, 2)]
    assert fxsplit.replay(path, events) == fxsplit.replay(jobs, rows, horizon_s=30.0)
    assert fxsplit.replay(path, events, horizon_s=50.0) == fxsplit.replay(jobs, rows, horizon_s=50.0)
    assert fxsplit.replay(path, events) != fxsplit.replay(path, events, horizon_s=50.0)
    assert fxsplit.allocate(path, 2, {"a": 1}).counts == {"a": 1}
    assert fxsplit.allocate(path, 2, {"a": 1}, horizon_s=50.0).counts == {"a": 2}


def test_what_is_missing_is_named(profile: Path) -> None:
    with refused(InputError, "there is no horizon: state horizon_s"):
        fxsplit.allocate([fxsplit.Job("a", [1.0])], 1)
    with refused(InputError, "job 'a' has a profile and no most: state the largest number of devices"):
        fxsplit.allocate([fxsplit.Job("a", profile=profile)], 1, horizon_s=1.0)
    with refused(InputError, "horizon_s='auto' needs the devices of the past"):
        fxsplit.allocate([fxsplit.Job("a", [1.0])], 1, horizon_s="auto")  # type: ignore[arg-type]
