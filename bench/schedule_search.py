"""Searched schedules beside named ones: idle time, gap to the optimum, and how much a slow link lengthens a step.

python -m bench.schedule_search                    # the tables of bench/README.md, on the models of bench.zero_bubble
python -m bench.schedule_search --picture idle.svg # one of them under 1F1B, ZBVZeroBubble and search, as a picture
python -m bench.schedule_search --small 250        # 250 small instances of each placement beside an exact referee
python -m bench.schedule_search --lines FOLDER     # plans of the profiles in FOLDER/pipedream, for 4 and 8 devices

With --processor-time, searches count the processor's seconds, for a machine with other work beside.

Memory is a share of what the first rank holds under 1F1B: as many microbatches as there are ranks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import mean

import fxsplit
from bench.zero_bubble import INSTANCES, Instance, count_kept, make_times
from fxsplit.report import save_picture
from fxsplit.schedule import SearchResult, Times, generate, search, simulate
from fxsplit.schedule.of_plan import read_times
from fxsplit.schedule.simulation.timeline import Timeline
from fxsplit.schedule.solver.search import warm_up
from tests.support import exact_schedules
from tests.support.torch_schedules import make_theirs

MEMORY = {0.5: 30.0, 0.625: 30.0, 0.75: 30.0, 1.0: 10.0, 1.25: 10.0, 1.5: 10.0, 2.0: 10.0}
"""The time limit of a search in seconds, by memory."""
LATENCIES = (0.0, 10.0, 20.0, 40.0, 60.0)
"""The latency of the slow link, in ms."""


def find(one: Instance, times: Times, memory: float, seconds: float, seed: int = 0) -> tuple[SearchResult, float]:
    """Return the searched schedule with two stages a rank within a share of 1F1B's memory, and the seconds it took."""
    begin = time.monotonic()
    found = search(
        times,
        n_devices=one.ranks,
        n_microbatches=one.batch,
        stages_per_device=2,
        memory=memory * one.ranks,
        kept_for_weights=count_kept(one),
        time_limit_s=seconds,
        seed=seed,
    )
    return found, time.monotonic() - begin


def tabulate_memory(
    instances: Sequence[Instance], memories: Sequence[float], seed: int, seconds: float | None = None
) -> Iterator[str]:
    """Yield the rows of a table: idle share, gap and seconds of the search in each memory, beside ZBVZeroBubble."""
    heads = ["ZBVZeroBubble", "of torch", *(f"search, {memory:g}x" for memory in memories)]
    yield f"| ranks x microbatches | {' | '.join(heads)} |"
    yield f"|---|{'---|' * len(heads)}"
    for one in instances:
        times = make_times(one, 2)
        own = simulate(generate("ZBVZeroBubble", one.ranks, one.batch, times=times), times)
        theirs = simulate(make_theirs("ZBVZeroBubble", one.ranks, one.batch), times)
        cells = [f"{100 * s.bubble:.2f}" for s in (own, theirs)]
        for memory in memories:
            found, took = find(one, times, memory, seconds or MEMORY[memory], seed)
            idle = 100 * simulate(found.schedule, times).bubble
            gap = "optimal" if found.gap <= 1e-6 else f"gap {100 * found.gap:.2f}"
            cells.append(f"{idle:.2f}, {gap}, {took:.1f} s")
        yield f"| {one.ranks} x {one.batch} | {' | '.join(cells)} |"


def slow_down(times: Times, one: Instance, latency_ms: float) -> Times:
    """Return the times with a latency of the link between the two ranks in the middle, in both directions."""
    count = len(times.forward_ms)
    middle = {one.ranks // 2, count - one.ranks // 2} if count > one.ranks else {one.ranks // 2}
    return replace(times, latency_ms=[latency_ms if stage in middle else 0.0 for stage in range(count)])


def tabulate_latency(one: Instance, seed: int) -> Iterator[str]:
    """Yield the rows of a table: the step with one slow link in ms, and how much longer it is than without latency."""
    named = (("1F1B", 1), ("ZB-H1", 1), ("ZBVZeroBubble", 2))
    heads = [*(name for name, _ in named), "search, 1x", "its bound", "search, 2x", "its bound"]
    yield f"| latency ms | {' | '.join(heads)} |"
    yield f"|---|{'---|' * len(heads)}"
    fast: list[float] = []
    for latency_ms in LATENCIES:
        steps = []
        for name, each in named:
            times = slow_down(make_times(one, each), one, latency_ms)
            steps.append(simulate(generate(name, one.ranks, one.batch, times=times), times).step_ms)
        times = slow_down(make_times(one, 2), one, latency_ms)
        for memory in (1.0, 2.0):
            found, _ = find(one, times, memory, 10.0, seed)
            steps += [found.step_ms, found.bound_ms]
        fast = fast or steps
        cells = [f"{step:.1f} (+{step - first:.1f})" for step, first in zip(steps, fast, strict=True)]
        yield f"| {latency_ms:g} | {' | '.join(cells)} |"


def count_small(count: int, seed: int) -> Iterator[str]:
    """Yield the rows of a table: how often bound and step equal the optimum of small random instances, by placement."""
    yield "| placement | instances | bound above | bound equal | step equal | step within 1 % | worst |"
    yield "|---|---|---|---|---|---|---|"
    for placement in ("line", "v", "loop"):
        steps, bounds = [], []
        for number in range(seed, seed + count):
            drawn = exact_schedules.draw(Random(f"{placement}{number}"), placement)
            found = search(
                drawn.state_times(),
                n_devices=drawn.p,
                n_microbatches=drawn.n,
                stages_per_device=1 if placement == "line" else 2,
                placement="loop" if placement == "loop" else "v",
                memory=list(drawn.memory) if max(drawn.memory) < exact_schedules.NEVER else None,
                kept_for_weights=list(drawn.kept),
                held=list(drawn.held),
                time_limit_s=0.5,
            )
            with suppress(exact_schedules.TooManyError):
                shortest = exact_schedules.find_optimum(drawn, found.step_ms)
                steps.append(found.step_ms / shortest - 1)
                bounds.append(found.bound_ms / shortest - 1)
        cells = [
            sum(bound > 1e-7 for bound in bounds),
            sum(abs(bound) <= 1e-6 for bound in bounds),
            sum(step <= 1e-6 for step in steps),
            sum(step <= 0.01 for step in steps),
        ]
        yield f"| {placement} | {len(steps)} | {' | '.join(map(str, cells))} | {100 * max(steps):.1f} % |"


def count_lines(folder: Path, seed: int) -> Iterator[str]:
    """Yield the rows of a table: how many searches for the plans of profiles end optimal in a second, by memory."""
    profiles = [path for path in sorted(folder.glob("pipedream/*.txt")) if path.stem != "LICENSE"]
    plans = [fxsplit.plan(path, devices) for path in profiles for devices in (4, 8)]
    yield "| seed | memory | searches | optimal | worst gap % | seconds, mean | slowest |"
    yield "|---|---|---|---|---|---|---|"
    memories = (
        ("1F1B's on each device", lambda p, n: [float(min(n, p - r)) for r in range(p)]),
        ("1F1B's on its first device", lambda p, n: float(min(n, p))),
        ("unlimited", lambda p, n: None),
    )
    for memory, count_most in memories:
        gaps, seconds = [], []
        for plan in plans:
            times, p = read_times(plan, generate("1F1B", len(plan.stages), 1)), len(plan.stages)
            for n in (4, 8, 16):
                most = count_most(p, n)
                begin = time.monotonic()
                found = search(times, n_devices=p, n_microbatches=n, memory=most, time_limit_s=1.0, seed=seed)
                seconds.append(time.monotonic() - begin)
                gaps.append(found.gap)
        cells = [len(gaps), sum(gap <= 1e-6 for gap in gaps), f"{100 * max(gaps):.2f}", f"{mean(seconds):.2f}"]
        yield f"| {seed} | {memory} | {' | '.join(map(str, cells))} | {max(seconds):.2f} |"


def draw(one: Instance, path: str) -> None:
    """Save a picture of an instance under 1F1B, ZBVZeroBubble and search."""
    timelines = []
    for name, each in (("1F1B", 1), ("ZBVZeroBubble", 2)):
        times = make_times(one, each)
        timelines.append(Timeline.of(simulate(generate(name, one.ranks, one.batch, times=times), times)))
    times = make_times(one, 2)
    timelines.append(Timeline.of(simulate(find(one, times, 1.0, 10.0)[0].schedule, times)))
    save_picture(timelines, path)


def main() -> None:
    """Print the tables, or draw a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=float, nargs="*", choices=MEMORY, default=[*MEMORY], help="default: all")
    parser.add_argument("--instances", type=int, nargs="*", default=[*range(len(INSTANCES))], help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="the limit of a search (default: 10, and 30 below 1x)")
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--picture", metavar="FILE")
    parser.add_argument("--small", type=int, metavar="N")
    parser.add_argument("--lines", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.picture:
        draw(INSTANCES[0], arguments.picture)
        return
    warm_up()
    if arguments.processor_time:
        # The searches' clock as well.
        time.monotonic = time.process_time
    if arguments.small or arguments.lines:
        counts = count_small(arguments.small, arguments.seed) if arguments.small else (
            count_lines(arguments.lines, arguments.seed))  # fmt: skip
        for line in counts:
            print(line, flush=True)
        return
    chosen = [INSTANCES[i] for i in arguments.instances]
    for line in tabulate_memory(chosen, arguments.memory, arguments.seed, arguments.seconds):
        print(line, flush=True)
    print()
    for line in tabulate_latency(INSTANCES[0], arguments.seed):
        print(line, flush=True)


if __name__ == "__main__":
    main()
