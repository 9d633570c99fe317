"""Print the peak memory of each worker in a training step next to the plan's: python -m bench.memory.

Each network is planned for two CPU devices under each schedule, with activations kept and recomputed. The program
measures live tensor storages (see counter.py), not the memory of the process. The plan's figure is the peak of its
simulation. Needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import warnings
from math import floor
from typing import Any

import torch
from torch.nn import functional as F

import fxsplit
from bench.memory.counter import start_counting
from bench.memory.measure import Peak, find_program, measure_step
from bench.memory.networks import NETWORKS, SCHEDULES
from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.schedule import simulate
from fxsplit.schedule.generators.catalogue import ASYNCHRONOUS
from fxsplit.schedule.of_plan import read_footprints, read_times
from fxsplit.schedule.simulation.memory import find_peak, trace_memory
from fxsplit.system.figures import format_bytes

ROWS = 8
"""Rows of a microbatch."""
WAYS = ("never", "always")


def main() -> None:
    """Print a row for each network and way to keep activations: the plan's peak over the measured peak."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--networks", default=",".join(NETWORKS), help="only these, by name")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="only these, by name")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--kinds", action="store_true", help="also print the parts of each peak")
    parser.add_argument("--live", action="store_true", help="also print the storages of each peak")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    start_counting()
    schedules = given.schedules.split(",")
    print(f"| network | recompute | {' | '.join(schedules)} |\n|{'---|' * (2 + len(schedules))}", flush=True)
    lines: list[str] = []
    for network in given.networks.split(","):
        known: Costs | None = None
        for way in WAYS:
            cells = []
            for schedule in schedules:
                pipe, peaks = run(network, schedule, way, given.microbatches, known, live=given.live)
                # Tied weights stay together if weight versions are kept, and are then priced otherwise.
                known = known or (None if schedule in ASYNCHRONOUS else pipe.costs)
                said = list_said(pipe, given.microbatches)
                cells.append(", ".join(show_share(plan, peak.held) for plan, peak in zip(said, peaks, strict=True)))
                lines += [f"\n{network}, {schedule}, recompute {way}", *list_kinds(pipe, peaks, said)]
            print(f"| {network} | {way} | {' | '.join(cells)} |", flush=True)
    if given.kinds or given.live:
        print("\n".join(lines))


def show_share(plan: float, held: int) -> str:
    """Return planned over measured bytes; a ratio below 1 is not rounded up to 1."""
    return f"{plan / held:.2f}" if plan >= held else f"{floor(100 * plan / held) / 100:.2f}"


def run(
    network: str, schedule: str, way: str, count: int, known: Costs | None, *, live: bool = False
) -> tuple[Pipeline, list[Peak]]:
    """Return a pipeline of a network that has run steps, and the peak of each device in the last step."""
    torch.manual_seed(0)
    asynchronous = schedule in ASYNCHRONOUS
    model, x, y = NETWORKS[network](ROWS * count)
    tied = "{tied=together}" if asynchronous else ""
    options: dict[str, Any] = {
        "n_microbatches": count,
        "loss_fn": F.cross_entropy,
        "schedule": schedule,
        "passes": f"profile{tied},augment,order,partition{{recompute={way}}},emit",
        "costs": known,
    }
    pipe = fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, **options)
    optimizer = torch.optim.Adam(model.parameters())
    return pipe, measure_step(pipe, x, y, optimizer, asynchronous=asynchronous, live=live)[0]


def list_said(pipe: Pipeline, count: int) -> list[float]:
    """Return each device's peak in the plan's simulation, in bytes."""
    schedule = find_program(pipe).schedule(count)
    simulation = simulate(schedule, read_times(pipe.plan, schedule))
    return [find_peak(trace) for trace in trace_memory(simulation, read_footprints(pipe.plan))]


def list_kinds(pipe: Pipeline, peaks: list[Peak], said: list[float]) -> list[str]:
    """Return the parts of each device's measured peak, and the parts of its stages in the plan."""
    lines = []
    for device, (peak, plan) in enumerate(zip(peaks, said, strict=True)):
        lines.append(
            f"  device {device}: {format_bytes(peak.held)} in {peak.action}, plan {format_bytes(plan)}; before it "
            f"{format_bytes(peak.before)}, including sums of gradients {format_bytes(peak.sums)}"
        )
        for one, times in sorted(peak.storages.items(), key=lambda pair: -pair[0].size * pair[1]):
            lines.append(f"    {times} x {one.size} bytes of {one.action}: {one.maker}")
    for number, stage in enumerate(pipe.plan.stages):
        lines.append(
            f"  stage {number}, planned: always {format_bytes(stage.held_bytes)}, for each microbatch under way "
            f"{format_bytes(stage.kept_bytes)} and boundaries {format_bytes(stage.in_bytes + stage.out_bytes)}"
        )
    return lines


if __name__ == "__main__":
    main()
