"""Jobs that share equal devices, in TOML, and the devices that are idle over time, in CSV. Example with two jobs:

horizon_s = 60                      # for how long devices are expected to stay, or "auto" for a replay
bytes_per_s = "25GB/s"              # each device's link, for jobs with a profile; default: unlimited
memory_bytes = "80GB"               # each device's memory, for jobs with a profile; default: unlimited
checkpoint_bytes_per_s = "1GB/s"    # at which checkpoints are written and read; default: unlimited
restart_s = 10                      # from the end of a job's work to its start on other devices; default: 10

[[jobs]]
name = "a"
curve = [1.0, 1.9, 2.7, 3.1]        # samples a second on 1, 2, 3 and 4 devices
least = 2                           # the job gets 0 or 2 .. 4 devices; default: 1
weight = 2.0                        # each sample counts twice; default: 1
up_s = 18                           # a change to more devices costs so many seconds of work; default: 0
down_s = 12                         # a change to fewer

[[jobs]]
name = "b"
profile = "b.json"                  # beside this file; its curve is planned
most = 8
n_microbatches = 16                 # of its batch, on any number of devices; default: two for each of `most`
checkpoint_bytes = "3GB"            # in place of up_s and down_s
"""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

from fxsplit.allocation.job import Job
from fxsplit.errors import InputError
from fxsplit.formats.toml_tables import check_keys, load_tables, take_number
from fxsplit.ir.facts.given.machine import Device
from fxsplit.system.figures import SHOWN, show
from fxsplit.system.files import explain_unreadable

TOP_KEYS = ("horizon_s", "bytes_per_s", "memory_bytes", "checkpoint_bytes_per_s", "restart_s")
KEYS = {"name", "curve", "profile", "least", "most", "weight", "up_s", "down_s", "n_microbatches", "checkpoint_bytes"}
COLUMNS = ["time_s", "devices"]
RESTART_S = 10.0
"""The seconds of a restart, unless the file states them: those of small jobs on one host with two cores."""


@dataclass(frozen=True)
class JobsFile:
    """The jobs of a file, the device that all devices are like, and the horizon, None if the file states none."""

    jobs: tuple[Job, ...]
    device: Device
    horizon_s: float | Literal["auto"] | None


def read_jobs(path: str | os.PathLike[str]) -> JobsFile:
    """Return the jobs that a TOML file describes.

    A job that states `checkpoint_bytes` and not its seconds writes its checkpoint before each move, restarts, and reads
    it. Raises InputError, with file, job and value, for an invalid file.
    """
    name, data, entries = load_tables(path, "jobs", "jobs", TOP_KEYS)
    horizon: float | Literal["auto"] | None = None
    if "horizon_s" in data:
        horizon = "auto" if data["horizon_s"] == "auto" else take_number(data, "horizon_s", inf, name)
    device = Device(
        "device",
        memory_bytes=take_number(data, "memory_bytes", inf, name),
        bytes_per_s=take_number(data, "bytes_per_s", inf, name),
    )
    rate = take_number(data, "checkpoint_bytes_per_s", inf, name)
    restart_s = take_number(data, "restart_s", RESTART_S, name)
    jobs = []
    for number, entry in enumerate(entries):
        where = f"{name!r}, jobs {number}"
        check_keys(entry, KEYS, where)
        stated = dict(entry)
        if "checkpoint_bytes" in stated:
            seconds = restart_s + 2.0 * take_number(stated, "checkpoint_bytes", 0.0, where) / rate
            del stated["checkpoint_bytes"]
            stated = {"up_s": seconds, "down_s": seconds} | stated
        jobs.append(_make_job(stated, where, Path(path).parent))
    return JobsFile(tuple(jobs), device, horizon)


def _make_job(stated: dict[str, Any], where: str, folder: Path) -> Job:
    """Return the job of an entry. Raises InputError with the place of an invalid value."""
    if "name" not in stated:
        raise InputError(f"{where} has no name: give one, to find the job's devices by")
    profile = stated.get("profile")
    if profile is not None:
        if not isinstance(profile, str) or not profile:
            raise InputError(f"{where} has profile={show(profile)}: give the path of a profile")
        stated = stated | {"profile": folder / profile}
    try:
        return Job(**stated)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def read_events(path: str | os.PathLike[str]) -> list[tuple[float, int]]:
    """Return the rows of a CSV file with the columns time_s and devices: so many devices are idle from then on.

    Raises InputError, with file and line, for an invalid file. `replay` checks the order of the times.
    """
    name = str(path)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            heads, *rows = [row for row in csv.reader(file) if row] or [[]]
    except (OSError, ValueError, csv.Error) as error:
        what = explain_unreadable(error)
        raise InputError(f"cannot read events from {name!r}: {what}; give a CSV with {','.join(COLUMNS)}") from error
    if [head.strip() for head in heads] != COLUMNS:
        raise InputError(f"{name!r} begins with {show(','.join(heads))}: give the columns {','.join(COLUMNS)}")
    events = []
    for number, row in enumerate(rows, 1):
        try:
            time_s, devices = row
            events.append((float(time_s), int(devices)))
        except ValueError as error:
            text = ",".join(row)[:SHOWN]
            raise InputError(
                f"{name!r}, event {number}: {text!r} is no time and number of devices, as in 60.5,4"
            ) from error
    return events
