"""Allocation: how long it takes beside a MILP, and the utilisation of devices that come and go.

python -m bench.allocation                       # the tables of bench/README.md
python -m bench.allocation --part trace          # only one of search, trace, horizons, seeds, dedicated
python -m bench.allocation --picture FILE        # the utilisation of the policies over a day, as a picture
python -m bench.allocation --profiles FOLDER     # plans the curves anew, from PipeDream's profiles in FOLDER

Times are of processor time, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import TypeVar

import numpy as np

import fxsplit
from fxsplit.allocation.allocate import choose_counts
from fxsplit.allocation.policies import POLICIES
from fxsplit.allocation.replay import Event
from fxsplit.api.allocate import Horizon
from fxsplit.planner import Options
from tests.support.milp import solve_milp

CURVES = {
    "resnet50": [1.0, 1.37, 1.86, 2.36, 2.88, 3.39, 3.91, 4.43, 4.95, 5.46, 5.98, 6.5, 7.02, 7.54, 8.06, 8.58],
    "vgg16": [1.0, 1.0, 1.62, 2.25, 2.86, 3.43, 3.98, 4.51, 5.01, 5.49, 5.95, 6.38, 6.8, 7.2, 7.59, 7.96],
    "resnet18": [1.0, 1.47, 2.03, 2.6, 3.17, 3.75, 4.33, 4.91, 5.49, 6.07, 6.65, 7.23, 7.81, 8.39, 8.97, 9.55],
    "squeezenet1_0": [
        1.0,
        1.93,
        2.87,
        3.8,
        4.73,
        5.67,
        6.6,
        7.54,
        8.47,
        9.41,
        10.34,
        11.28,
        12.21,
        13.15,
        14.08,
        15.01,
    ],
    "alexnet": [1.0, 1.0, 1.28, 1.61, 1.88, 2.11, 2.3, 2.46, 2.61, 2.73, 2.84, 2.93, 3.02, 3.06, 3.06, 3.06],
    "resnext50": [1.0, 1.49, 2.07, 2.65, 3.24, 3.83, 4.43, 5.02, 5.62, 6.21, 6.81, 7.4, 8.0, 8.59, 9.19, 9.78],
}
"""The speed-ups of six networks on 1 to 16 devices, planned with replicated stages and links of 1 GB/s."""
UP_S, DOWN_S = 18.0, 12.0
"""The seconds of work that a job loses by a move to more and to fewer devices, as in BFTrainer."""
HORIZONS_S = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
DAY_H = 24.0
PARTS = ("search", "trace", "horizons", "seeds", "dedicated")
R = TypeVar("R")


def plan_curves(folder: Path) -> dict[str, list[float]]:
    """Return the speed-ups of the networks of CURVES, planned from the profiles in a folder."""
    curves = {}
    for name in CURVES:
        planned = [
            fxsplit.plan(
                folder / f"{name}.txt",
                fxsplit.Machine.planned(n, bytes_per_s=1e9),
                options=Options(model="replicated", use_all=False),
            )
            for n in range(1, 17)
        ]
        best = np.minimum.accumulate([plan.bottleneck_ms for plan in planned])
        curves[name] = [round(float(best[0] / ms), 2) for ms in best]
    return curves


def make_jobs(each: int = 1, curves: dict[str, list[float]] = CURVES) -> list[fxsplit.Job]:
    """Return `each` jobs for each curve."""
    return [
        fxsplit.Job(f"{name} {number}", curve, up_s=UP_S, down_s=DOWN_S)
        for number in range(each)
        for name, curve in curves.items()
    ]


def make_trace(seed: int, hours: float = DAY_H, idle_min: float = 12.0, nodes: int = 96) -> list[Event]:
    """Return the events of nodes that come and go: each is idle for `idle_min` on average, and busy twice as long.

    Both times are exponential. There is an event for each change of a node, and for its first state.
    """
    random = Random(seed)
    changes: list[tuple[float, int]] = []
    for _ in range(nodes):
        time_s, idle, before = 0.0, random.random() < 1 / 3, 0
        while time_s < hours * 3600.0:
            changes.append((time_s, int(idle) - before))
            time_s += random.expovariate(1.0 / (60.0 * idle_min * (1 if idle else 2)))
            before, idle = int(idle), not idle
    changes.sort()
    counts = np.cumsum([change for _, change in changes]).tolist()
    return [
        *((time_s, count) for (time_s, _), count in zip(changes, counts, strict=True)),
        (hours * 3600.0, counts[-1]),
    ]


def time_search() -> Iterator[str]:
    """Yield the time of an allocation for 10 to 100 jobs, beside scipy's MILP for the smaller ones."""
    yield "| jobs x devices | curves of | search, ms | MILP, ms |\n|---|---|---|---|"
    for n_jobs, n_devices, length in ((10, 100, 16), (30, 500, 16), (100, 1000, 16), (100, 1000, 1000)):
        random = np.random.default_rng(n_jobs)
        curves = np.cumsum(random.uniform(0.0, 1.0, (n_jobs, length)), 1)
        jobs = [fxsplit.Job(f"job {i}", curve.tolist(), up_s=UP_S, down_s=DOWN_S) for i, curve in enumerate(curves)]
        values = [job.gains(2, 60.0) for job in jobs]
        own, counts = measure(partial(choose_counts, values, n_devices))
        beside = "-"
        if n_jobs < 30:
            theirs, best = measure(partial(solve_milp, values, n_devices))
            assert counts is not None
            assert np.isclose(best, sum(value[count] for value, count in zip(values, counts, strict=True)))
            beside = f"{1e3 * theirs:.0f}"
        yield f"| {n_jobs} x {n_devices:,} | {length:,} | {1e3 * own:.1f} | {beside} |"


def measure(run: Callable[[], R], repeats: int = 3) -> tuple[float, R]:
    """Return the least processor time of a few runs in seconds, and the result."""
    seconds = []
    for _ in range(repeats):
        begin = time.process_time()
        result = run()
        seconds.append(time.process_time() - begin)
    return min(seconds), result


def tabulate_trace(curves: dict[str, list[float]]) -> Iterator[str]:
    """Yield the replay of a day of 96 nodes and six jobs, and its time."""
    events = make_trace(1)
    seconds, played = measure(lambda: fxsplit.replay(make_jobs(1, curves), events, horizon_s=60.0), repeats=1)
    yield f"{played}\n{seconds:.2f} s for all policies"
    for policy in POLICIES:
        run = partial(fxsplit.replay, make_jobs(1, curves), events, horizon_s=60.0, policies=[policy])
        yield f"{policy}: {measure(run, repeats=1)[0]:.2f} s"


def find_utilisation(jobs: Sequence[fxsplit.Job], events: Sequence[Event], horizon_s: Horizon) -> float:
    """Return the utilisation of the exact policy."""
    played = fxsplit.replay(jobs, events, horizon_s=horizon_s, policies=["exact"])
    return played.outcomes["exact"].utilisation


def tabulate_horizons(curves: dict[str, list[float]]) -> Iterator[str]:
    """Yield the utilisation of the exact policy by the horizon, for nodes that are idle for shorter and longer."""
    yield f"| idle, min | events | {' | '.join(f'{h:g} s' for h in HORIZONS_S)} | auto |"
    yield f"|---|---|{'---|' * (len(HORIZONS_S) + 1)}"
    for idle_min in (12.0, 30.0, 60.0, 120.0):
        events = make_trace(1, idle_min=idle_min)
        horizons: tuple[Horizon, ...] = (*HORIZONS_S, "auto")
        shares = [find_utilisation(make_jobs(1, curves), events, horizon_s) for horizon_s in horizons]
        yield f"| {idle_min:g} | {len(events) - 1:,} | {' | '.join(f'{share:.3f}' for share in shares)} |"


def compare_policies(curves: dict[str, list[float]], seeds: int = 20, hours: float = 6.0) -> Iterator[str]:
    """Yield the utilisation of each policy over traces of six hours, and how often exact is below another."""
    yield f"| horizon | {' | '.join(POLICIES)} | exact below another |\n|---|{'---|' * (len(POLICIES) + 1)}"
    horizons: tuple[Horizon, ...] = (60.0, "auto")
    for horizon_s in horizons:
        shares = np.array(
            [
                [
                    one.utilisation
                    for one in fxsplit.replay(
                        make_jobs(1, curves), make_trace(seed, hours), horizon_s=horizon_s
                    ).outcomes.values()
                ]
                for seed in range(seeds)
            ]
        )
        below = int((shares[:, 0] < shares.max(1)).sum())
        cells = " | ".join(f"{low:.3f} to {high:.3f}" for low, high in zip(shares.min(0), shares.max(0), strict=True))
        yield f"| {horizon_s} | {cells} | {below} of {seeds} |"


def approach_dedicated(curves: dict[str, list[float]]) -> Iterator[str]:
    """Yield the utilisation for more jobs on the same nodes, and for nodes that are idle for longer."""
    yield "| jobs | idle, min | U | pre-emption | rescaling | allocation | concavity |\n|---|---|---|---|---|---|---|"
    for each, idle_min in ((1, 12.0), (2, 12.0), (5, 12.0), (1, 60.0), (2, 60.0), (2, 120.0)):
        events = make_trace(1, hours=8.0, idle_min=idle_min)
        played = fxsplit.replay(make_jobs(each, curves), events, horizon_s="auto", policies=["exact"])
        one = played.outcomes["exact"]
        cells = " | ".join(f"{share:.3f}" for share in (one.utilisation, *one.losses.values()))
        yield f"| {len(CURVES) * each} | {idle_min:g} | {cells} |"


def main() -> None:
    """Print the tables, or draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--picture")
    parser.add_argument("--profiles", type=Path)
    arguments = parser.parse_args()
    curves = plan_curves(arguments.profiles) if arguments.profiles else CURVES
    if arguments.picture:
        fxsplit.replay(make_jobs(1, curves), make_trace(1), horizon_s=60.0).picture(arguments.picture)
        return
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "search": time_search,
        "trace": lambda: tabulate_trace(curves),
        "horizons": lambda: tabulate_horizons(curves),
        "seeds": lambda: compare_policies(curves),
        "dedicated": lambda: approach_dedicated(curves),
    }
    for name, part in parts.items():
        if arguments.part in (None, name):
            print(f"\n{name}")
            for line in part():
                print(line, flush=True)


if __name__ == "__main__":
    main()
