"""Plans for the shortest step beside plans for the smallest bottleneck, on profiles of other tools.

python -m bench.step FOLDER                          # a table: FOLDER has profiles in PipeDream's format, *.txt
python -m bench.step FOLDER --microbatches 4 16 32   # with these numbers of microbatches
python -m bench.step FOLDER --cost-model forwarded   # without replicas
python -m bench.step --small 1000                    # 1,000 small random graphs beside an exact referee

All steps are simulated under one rule of transfers: both devices are busy while a value crosses a cut. Memory is not
limited, and all devices and links are equal.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

from fxsplit.api.plan import lay_out
from fxsplit.errors import FxsplitError
from fxsplit.formats import read
from fxsplit.ir.facts.costs.costs import Costs, InputCost, NodeCost
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from fxsplit.schedule.generators.catalogue import SEARCH
from fxsplit.schedule.search_plan import state_step
from tests.support.graphs import downsets
from tests.support.steps import NAMED, find_shortest

DEVICES, BANDWIDTHS = (4, 8), (1e9, 1e10, 2.5e10)
MODELS = ("forwarded", "replicated")
CLOSE = 1e-6
"""A plan whose step is longer than the optimum by this share at most equals it."""


class Row(NamedTuple):
    """The steps of one case, in ms.

    - `usual`: of the plans with the smallest bottleneck on all devices under 1F1B, by cost model
    - `best_usual`: the best of these plans on up to so many devices, under 1F1B, GPipe and ZB-H1
    """

    case: str
    ideals: int
    usual: tuple[float, ...]
    best_usual: float
    plan: Plan
    seconds: float


def plan_usual(planner: Planner, devices: int, bandwidth: float, m: int) -> tuple[tuple[float, ...], float]:
    """Return the steps of plans with the smallest bottleneck; see Row."""
    steps: dict[tuple[str, int, str], float] = {}
    for model in MODELS:
        for count in range(1, devices + 1):
            for name in NAMED:
                machine, workload = lay_out(Machine.planned(count, bandwidth), name, m)
                plan = state_step(planner.plan(machine, workload, Options(model=model, use_all=False)), count)
                steps[model, count, name] = plan.step_ms or float("inf")
    return tuple(steps[model, devices, "1F1B"] for model in MODELS), min(steps.values())


def measure(path: Path, devices: int, bandwidth: float, m: int, model: str) -> Row:
    """Plan one case, from reading the profile to the plan."""
    begin = time.perf_counter()
    planner = Planner(read(str(path), by_bytes=True).costs)
    machine, workload = lay_out(Machine.planned(devices, bandwidth), SEARCH, m)
    plan = planner.plan(machine, workload, Options(model=model, use_all=False, objective="step"))
    seconds = time.perf_counter() - begin
    case = f"{path.stem} {devices} @{bandwidth / 1e9:g}"
    return Row(case, plan.n_states, *plan_usual(planner, devices, bandwidth, m), plan, seconds)


def tabulate(folder: Path, m: int, model: str) -> Iterator[str]:
    """Yield the rows of a table, and a summary."""
    yield f"| {m} microbatches: network, devices @GB/s | ideals | 1F1B | best | step | stages | bound | gap % | s |"
    yield "|---|---|---|---|---|---|---|---|---|"
    rows = []
    for path in sorted(folder.rglob("*.txt")):
        for devices in DEVICES:
            for bandwidth in BANDWIDTHS:
                try:
                    row = measure(path, devices, bandwidth, m, model)
                except FxsplitError as error:
                    yield f"| {path.stem} {devices} @{bandwidth / 1e9:g} | {error} | | | | | | | |"
                    break
                rows.append(row)
                plan, stages = row.plan, "+".join(str(len(s.devices)) for s in row.plan.stages)
                usual = f"{' / '.join(f'{step:.1f}' for step in row.usual)} | {row.best_usual:.1f}"
                found = f"{plan.step_ms:.1f} | {stages} | {plan.step_lower_bound_ms:.1f}"
                gap = f"{100 * (plan.step_gap or 0.0):.2f} | {row.seconds:.1f}"
                yield f"| {row.case} | {row.ideals} | {usual} | {found} | {gap} |"
    yield ""
    yield from summarise(rows)


def summarise(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how many gaps are small, how long plans took, and how much faster their steps are."""
    if not rows:
        return
    gaps = [row.plan.step_gap or 0.0 for row in rows]
    steps = [row.plan.step_ms or 0.0 for row in rows]
    within = ", ".join(f"{sum(gap <= share for gap in gaps)} <= {100 * share:g} %" for share in (1e-3, 1e-2, 5e-2))
    yield f"{len(rows)} cases: gap {within}, worst {100 * max(gaps):.2f} %"
    yield f"seconds: median {median(r.seconds for r in rows):.2f}, worst {max(r.seconds for r in rows):.2f}"
    for what, before in (
        ("the better cost model under 1F1B", [min(row.usual) for row in rows]),
        ("the best of all of these plans", [row.best_usual for row in rows]),
    ):
        faster = sum(old / new for old, new in zip(before, steps, strict=True)) / len(rows) - 1
        slower = sum(new > old * (1 + CLOSE) for old, new in zip(before, steps, strict=True))
        yield f"beside {what}: {100 * faster:.1f} % faster in the mean, slower in {slower}"


def draw(seed: int) -> tuple[Costs, Machine, int]:
    """Draw a graph of up to 6 nodes, up to 4 devices, and a number of microbatches."""
    rng = Random(seed)
    tied = rng.random() < 0.3

    def number(most: float) -> float:
        return float(rng.randint(0, 4)) if tied else rng.uniform(0.0, most)

    nodes: list[NodeCost] = []
    for i in range(rng.randint(2, 6)):
        earlier = [f"n{j}" for j in range(i) if rng.random() < 0.45]
        size = int(number(3.0) * 1e6)
        idle = rng.random() < 0.15
        forward, backward = (0.0, 0.0) if idle else (number(6.0), number(12.0))
        weights = 0 if rng.random() < 0.5 else int(number(3.0) * 1e6)
        inputs = tuple(earlier) or ("x",)
        nodes.append(NodeCost(f"n{i}", "f", "", "f", inputs, forward, backward, size, size, 0, weights, 0))
    costs = Costs(tuple(nodes), (InputCost("x", 0, 0),), (nodes[-1].name,), rows=1)
    bandwidth = rng.choice([1e8, 3e8, 1e9, 3e9, 1e10])
    return costs, Machine.planned(rng.randint(2, 4), bandwidth), rng.randint(2, 4)


def count_small(count: int, first: int, most_orders: int) -> Iterator[str]:
    """Yield how often bound and step of small random graphs equal the optimum."""
    made = above = below = 0
    complete: list[tuple[float, float]] = []
    every: list[float] = []
    for seed in range(first, first + count):
        costs, machine, m = draw(seed)
        if len(downsets(costs)) > 11:
            continue
        best = find_shortest(costs, machine, m, replicas=True, most=most_orders)
        laid_out, workload = lay_out(machine, SEARCH, m)
        options = Options(model="replicated", use_all=False, objective="step")
        plan = Planner(costs).plan(laid_out, workload, options)
        step, low = plan.step_ms or 0.0, plan.step_lower_bound_ms or 0.0
        made += 1
        if low > best.orders * (1 + 1e-9):
            above += 1
            yield f"seed {seed}: bound {low} above {best.orders}"
        every.append(plan.step_gap or 0.0)
        if best.complete:
            below += step < best.orders * (1 - 1e-9)
            complete.append((step / best.orders - 1 if best.orders else 0.0, best.orders / low - 1 if low else 0.0))
    yield f"{made} graphs: bound above the optimum in {above}, step below it in {below}"
    steps = [step for step, _ in complete]
    within = [sum(step <= share for step in steps) for share in (CLOSE, 1e-2)]
    yield f"{len(steps)} with all orders tried: step equal in {within[0]}, within 1 % in {within[1]}"
    tight = [sum(low <= share for _, low in complete) for share in (3e-4, 1e-2, 5e-2)]
    yield f"of these, optimum above the bound by at most 0.03, 1, 5 % in {', '.join(map(str, tight))}"
    shares = [sum(gap <= share for gap in every) for share in (1e-3, 1e-2, 5e-2)]
    yield f"gap at most 0.1, 1, 5 % in {', '.join(map(str, shares))} of {made}"


def main() -> None:
    """Print a table, or count small graphs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--microbatches", type=int, nargs="*", default=[8])
    parser.add_argument("--cost-model", choices=MODELS, default="replicated")
    parser.add_argument("--small", type=int, metavar="N")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first small graph")
    parser.add_argument("--orders", type=int, default=30_000, help="lines with more orders run named schedules only")
    arguments = parser.parse_args()
    if arguments.small:
        for line in count_small(arguments.small, arguments.first, arguments.orders):
            print(line, flush=True)
        return
    if arguments.folder is None:
        parser.error("give a folder with profiles, or --small")
    for m in arguments.microbatches:
        for line in tabulate(arguments.folder, m, arguments.cost_model):
            print(line, flush=True)


if __name__ == "__main__":
    main()
