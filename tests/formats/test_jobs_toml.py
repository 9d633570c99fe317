"""Jobs in TOML and idle devices in CSV: values and their defaults, and errors with their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxsplit.allocation.job import Job
from fxsplit.errors import InputError
from fxsplit.formats.jobs_toml import read_events, read_jobs
from tests.support.refusals import refused

JOB = "[[jobs]]\nname = 'a'\n"


def test_values_and_defaults(tmp_path: Path) -> None:
    path = tmp_path / "jobs.toml"
    path.write_text(
        "horizon_s = 60\nbytes_per_s = '25GB/s'\nmemory_bytes = '80GB'\ncheckpoint_bytes_per_s = 1e9\nrestart_s = 5\n"
        f"{JOB}curve = [1, 1.9]\nleast = 2\nweight = 2.0\nup_s = 18\ndown_s = 12\n"
        "[[jobs]]\nname = 'b'\nprofile = 'b.json'\nmost = 8\nn_microbatches = 16\ncheckpoint_bytes = '3GB'\n"
        "[[jobs]]\nname = 'c'\ncurve = [1]\ncheckpoint_bytes = 1e9\ndown_s = 0.0"
    )
    read = read_jobs(path)
    assert (read.horizon_s, read.device.bytes_per_s, read.device.memory_bytes) == (60.0, 25e9, 80e9)
    assert read.jobs == (
        Job("a", (1.0, 1.9), least=2, weight=2.0, up_s=18, down_s=12),
        # A checkpoint of 3 GB is written and read at 1 GB/s.
        Job("b", most=8, profile=tmp_path / "b.json", n_microbatches=16, up_s=11.0, down_s=11.0),
        Job("c", (1.0,), up_s=7.0, down_s=0.0),
    )
    path.write_text(f"{JOB}curve = [1]\ncheckpoint_bytes = 1e12")
    plain = read_jobs(path)
    assert plain.horizon_s is None and plain.jobs[0].up_s == 10.0
    path.write_text(f"horizon_s = 'auto'\n{JOB}curve = [1]")
    assert read_jobs(path).horizon_s == "auto"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"has no \[\[jobs\]\]: give horizon_s, .* and at least one \[\[jobs\]\] table"),
        ("horizon = 3\n" + JOB, "has 'horizon': give horizon_s.*did you mean 'horizon_s'"),
        ("horizon_s = 'later'\n" + JOB, "has horizon_s='later': give a positive number"),
        ("horizon_s = 0\n" + JOB, "has horizon_s=0: give a positive number"),
        ("jobs = 3", r"has no \[\[jobs\]\]"),
        ("jobs = [3]", "jobs 0 has '\\?': known are"),
        (JOB + "curves = [1]", "jobs 0 has 'curves': known are .*did you mean 'curve'"),
        (JOB + "curve = [1]\nmost = 2", "jobs 0: job 'a' has most=2 and a curve of 1"),
        ("[[jobs]]\ncurve = [1]", "jobs 0 has no name: give one"),
        (JOB + "profile = 3", "jobs 0 has profile=3: give the path of a profile"),
        (JOB + "curve = [1]\ncheckpoint_bytes = '3Gb'", "jobs 0 has checkpoint_bytes='3Gb': give bytes"),
        ("a = " + "[" * 20_000, "cannot read jobs from .*; give \\[\\[jobs\\]\\] tables"),
    ],
)
def test_what_is_wrong_with_jobs_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "jobs.toml"
    path.write_text(text)
    with refused(InputError, message):
        read_jobs(path)


def test_events(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    path.write_text("\ufefftime_s, devices\n0,8\n\n300.5, 5\n", encoding="utf-8")
    assert read_events(path) == [(0.0, 8), (300.5, 5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with '': give the columns time_s,devices"),
        ("time,devices\n0,1", "begins with 'time,devices': give the columns time_s,devices"),
        ("time_s,devices\n0,1\n5", "event 2: '5' is no time and number of devices, as in 60.5,4"),
        ("time_s,devices\n0,1.5", "event 1: '0,1.5' is no time and number"),
        ("time_s,devices\n0,one", "event 1: '0,one' is no time"),
    ],
)
def test_what_is_wrong_with_events_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    path.write_text(text)
    with refused(InputError, message):
        read_events(path)
    with refused(InputError, "cannot read events from .*; give a CSV with time_s,devices"):
        read_events(tmp_path / "none.csv")
