"""`fxsplit allocate`: which of several jobs gets how many of the devices that they share, and replays of the past."""

from __future__ import annotations

import argparse
from typing import Any

from fxsplit.allocation.allocate import OBJECTIVES, Allocation
from fxsplit.allocation.replay import Replay
from fxsplit.api.allocate import allocate, replay
from fxsplit.cli.output import print_json, print_parts
from fxsplit.cli.words import add_examples, add_json, add_picture, check_picture, take_text
from fxsplit.errors import InputError
from fxsplit.system.figures import SHOWN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `allocate`."""
    parser.add_argument("file", metavar="JOBS", help="a jobs.toml: the horizon, and each job's curve or profile")
    parser.add_argument("--devices", type=int, metavar="N", help="the devices to share; not with --replay")
    parser.add_argument("--current", type=take_text, metavar="A=N,B=N", help="the devices that jobs have now")
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        help="make the work of all jobs large, or the smallest share of its own best rate that a job gets "
        "(default: throughput)",
    )
    parser.add_argument(
        "--replay", type=take_text, metavar="CSV", help="a time_s,devices table: replay it under each policy"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="--replay: of the devices that go (default: 0)")
    add_picture(parser, "the utilisation of a --replay over time")
    add_json(parser)
    add_examples(
        parser,
        ("how to share 16 devices among jobs", "fxsplit allocate jobs.toml --devices 16"),
        ("devices that come and go", "fxsplit allocate jobs.toml --replay devices.csv"),
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the allocation, or the replay, as a table or JSON. Raises InputError for options of the other one."""
    check_picture(arguments)
    given = {name: getattr(arguments, name) is not None for name in ("devices", "current", "objective", "replay")}
    if not given.pop("replay"):
        if arguments.devices is None:
            raise InputError("give --devices N, the devices to share, or --replay CSV, the devices of the past")
        for name in ("seed", "picture"):
            if getattr(arguments, name) is not None:
                raise InputError(f"--{name} {getattr(arguments, name)}: it is for --replay")
        current = _parse_current(arguments.current)
        found = allocate(arguments.file, arguments.devices, current, objective=arguments.objective or "throughput")
        if arguments.json:
            print_json(_describe(found))
        else:
            print_parts(found.show())
        return 0
    odd = next((name for name, is_given in given.items() if is_given), None)
    if odd is not None:
        raise InputError(f"--{odd} {getattr(arguments, odd)}: --replay takes devices from its file, so leave it out")
    played = replay(arguments.file, arguments.replay, seed=arguments.seed or 0)
    if arguments.picture:
        played.picture(arguments.picture, dark=arguments.dark)
    if arguments.json:
        print_json(_describe_replay(played))
    else:
        print_parts(played.show())
    return 0


def _parse_current(text: str | None) -> dict[str, int]:
    """Return the devices of each job in --current. Raises InputError for another form, or a job that is named twice."""
    counts: dict[str, int] = {}
    for part in text.split(",") if text else ():
        name, _, count = part.rpartition("=")
        if not name or not count.isdecimal() or len(count) > SHOWN or name in counts:
            raise InputError(
                f"--current {part[:SHOWN]}: give each job once with its number of devices, such as a=4,b=2"
            )
        counts[name] = int(count)
    return counts


def _describe(found: Allocation) -> dict[str, Any]:
    """Return an allocation as a JSON object for other programs. Curves are in it, since planned ones take time."""
    jobs = {
        job.name: {
            "devices": found.counts[job.name],
            "gain": found.gains[job.name],
            "samples_per_s": job.rate(found.counts[job.name]),
            "why_no_more": found.reasons[job.name],
            "curve": list(job.curve),
        }
        for job in found.jobs
    }
    return {"counts": found.counts, "objective": found.objective, "n_devices": found.n_devices, "jobs": jobs}


def _describe_replay(played: Replay) -> dict[str, Any]:
    """Return a replay as a JSON object for other programs."""
    policies = {
        name: {
            "utilisation": one.utilisation,
            "losses": one.losses,
            "moves": one.moves,
            "preemptions": one.preemptions,
            "last_horizon_s": one.horizon_s,
            "weighted_samples": one.samples[-1],
        }
        for name, one in played.outcomes.items()
    }
    figures = {"mean_devices": played.mean_devices, "dedicated_samples_per_s": played.dedicated_rate}
    return {"policies": policies, "n_events": len(played.events), **figures}
