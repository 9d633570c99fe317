"""Plans for the shortest step beside plans for the smallest bottleneck, on profiles of other tools.

python -m bench.step FOLDER                          # a table: FOLDER has profiles in PipeDream's format, *.txt
python -m bench.step FOLDER --microbatches 4 16 32   # with these numbers of microbatches
python -m bench.step FOLDER --cost-model forwarded   # without replicas
python -m bench.step FOLDER --memory 0.5             # devices with this share of what the model holds on one device
python -m bench.step --small 1000                    # 1,000 small random graphs beside an exact referee

All steps are simulated under one rule of transfers: both devices are busy while a value crosses a cut. All devices and
links are equal, and memory is not limited by default.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

from fxsplit.api.plan import lay_out
from fxsplit.errors import FxsplitError, NoFit, PlanError, ScheduleError
from fxsplit.formats import read
from fxsplit.ir.facts.costs.costs import Costs, InputCost, NodeCost
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from fxsplit.planner.step.usual import NAMED as TWO
from fxsplit.schedule.generators.catalogue import SEARCH, Scheduler
from fxsplit.schedule.of_plan import build_schedule
from fxsplit.schedule.schedule_plan import schedule_plan, simulate_step
from tests.support.graphs import downsets
from tests.support.steps import NAMED, find_shortest, find_shortest_chain

DEVICES, BANDWIDTHS = (4, 8), (1e9, 1e10, 2.5e10)
MODELS = ("forwarded", "replicated")
TWO_STAGES = tuple(name for names in TWO.values() for name in names)
CLOSE = 1e-6
"""A plan whose step is longer than the optimum by this share at most equals it."""


class Row(NamedTuple):
    """The steps of one case, in ms, the number of ideals of its graph, and the seconds of processor time to plan it.

    - `usual`: of the plan with the smallest bottleneck on all devices under 1F1B, one for each of MODELS
    - `best_usual`: the best of such plans on one to all devices, under 1F1B, GPipe, ZB-H1 and the named schedules with
      two stages a device
    - `plan`: the plan for the shortest step, None if none fits
    """

    case: str
    ideals: int
    usual: tuple[float, ...]
    best_usual: float
    plan: Plan | None
    seconds: float


def plan_usual(planner: Planner, machine: Machine, m: int) -> tuple[tuple[float, ...], float]:
    """Return the steps of plans with the smallest bottleneck, infinite for those that do not fit; see Row."""
    steps: dict[tuple[str, int, str], float] = {}
    for count, model in product(range(1, len(machine) + 1), MODELS):
        fewer = replace(machine, devices=machine.devices[:count], links=machine.links[: count - 1])
        # Stages have no replicas if devices have two.
        for name in (*NAMED, *(TWO_STAGES if model == "forwarded" and count > 1 else ())):
            steps[model, count, name] = inf
            # Some graphs have too few nodes, and some schedules take only certain numbers of microbatches.
            with suppress(PlanError, ScheduleError):
                laid_out, workload = lay_out(fewer, name, m)
                plan = planner.plan(laid_out, workload, Options(model=model, use_all=False))
                plan = schedule_plan(plan, planner.costs, laid_out, workload)[0]
                memory = [device.memory_bytes for device in fewer.devices]
                made = build_schedule(plan, Scheduler(name, count), m, memory)
                steps[model, count, name] = simulate_step(plan, made)
    return tuple(steps[model, len(machine), "1F1B"] for model in MODELS), min(steps.values())


def measure(path: Path, devices: int, bandwidth: float, m: int, model: str, memory: float = inf) -> Row:
    """Plan one case, and count the seconds of processor time from reading the profile to the plan.

    `memory` is the memory of a device, as a share of what the whole model holds on one device.
    """
    begin = time.process_time()
    planner = Planner(read(str(path), by_bytes=True).costs)
    machine = Machine.planned(devices, bandwidth)
    if memory < inf:
        alone, workload = lay_out(Machine.planned(1, bandwidth), "1F1B", m)
        whole = planner.plan(alone, workload, Options()).stages[0].memory_bytes
        machine = Machine.planned(devices, bandwidth, memory * whole)
    laid_out, workload = lay_out(machine, SEARCH, m)
    plan = None
    with suppress(NoFit):
        plan = planner.plan(laid_out, workload, Options(model=model, use_all=False, objective="step"))
    seconds = time.process_time() - begin
    ideals = len(planner.lattice(machine)[0])
    case = f"{path.stem} {devices} @{bandwidth / 1e9:g}"
    return Row(case, ideals, *plan_usual(planner, machine, m), plan, seconds)


def tabulate(folder: Path, m: int, model: str, memory: float = inf) -> Iterator[str]:
    """Yield the rows of a table, and a summary."""
    yield f"| {m} microbatches: network, devices @GB/s | ideals | 1F1B | best | step | stages | bound | gap % | s |"
    yield "|---|---|---|---|---|---|---|---|---|"
    rows = []
    for path in sorted(folder.rglob("*.txt")):
        for devices in DEVICES:
            for bandwidth in BANDWIDTHS:
                try:
                    row = measure(path, devices, bandwidth, m, model, memory)
                except FxsplitError as error:
                    yield f"| {path.stem} {devices} @{bandwidth / 1e9:g} | {error} | | | | | | | |"
                    break
                rows.append(row)
                plan, usual = row.plan, f"{' / '.join(f'{step:.1f}' for step in row.usual)} | {row.best_usual:.1f}"
                if plan is None:
                    yield f"| {row.case} | {row.ideals} | {usual} | does not fit | | | | {row.seconds:.1f} |"
                    continue
                stages = describe_stages(plan)
                found = f"{plan.step_ms:.1f} | {stages} | {plan.step_lower_bound_ms:.1f}"
                gap = f"{100 * (plan.step_gap or 0.0):.2f} | {row.seconds:.1f}"
                yield f"| {row.case} | {row.ideals} | {usual} | {found} | {gap} |"
    yield ""
    yield from summarise(rows)


def describe_stages(plan: Plan) -> str:
    """Return the numbers of the stages' devices, or with two stages a device the placement and the devices."""
    homes = plan.machine.homes if plan.machine is not None else ()
    if homes:
        return f"{'V' if homes[0] == homes[-1] else 'loop'} {len(set(homes))}"
    return "+".join(str(len(s.devices)) for s in plan.stages)


def summarise(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how many gaps are small, how long plans took, and how much faster their steps are."""
    lacking = [row for row in rows if row.plan is None]
    if lacking:
        missed = sum(row.best_usual < inf for row in lacking)
        yield f"no plan in {len(lacking)} of {len(rows)} cases, and one of the smallest bottleneck in {missed} of them"
    rows = [row for row in rows if row.plan is not None]
    plans = [row.plan for row in rows if row.plan is not None]
    if not plans:
        return
    gaps = [plan.step_gap or 0.0 for plan in plans]
    steps = [plan.step_ms or 0.0 for plan in plans]
    within = ", ".join(f"{sum(gap <= share for gap in gaps)} <= {100 * share:g} %" for share in (1e-3, 1e-2, 5e-2))
    yield f"{len(rows)} cases: gap {within}, worst {100 * max(gaps):.2f} %"
    yield f"seconds: median {median(r.seconds for r in rows):.2f}, worst {max(r.seconds for r in rows):.2f}"
    for what, before in (
        ("the better cost model under 1F1B", [min(row.usual) for row in rows]),
        ("the best of all of these plans", [row.best_usual for row in rows]),
    ):
        there = [(old, new) for old, new in zip(before, steps, strict=True) if old < inf]
        faster = sum(old / new for old, new in there) / max(1, len(there)) - 1
        slower = sum(new > old * (1 + CLOSE) for old, new in there)
        yield f"beside {what} (in {len(there)} cases): {100 * faster:.1f} % faster in the mean, slower in {slower}"


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
    made = above = below = chains = 0
    complete: list[tuple[float, float]] = []
    every: list[float] = []
    for seed in range(first, first + count):
        costs, machine, m = draw(seed)
        if len(downsets(costs)) > 11:
            continue
        one = find_shortest(costs, machine, m, replicas=True, most=most_orders)
        two = find_shortest_chain(costs, machine, m, most=most_orders)
        best = one._replace(orders=min(one.orders, two.orders), complete=one.complete and two.complete)
        chains += two.orders < one.orders * (1 - 1e-9)
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
            # The referee leaves out chains with stages that cost nothing.
            weighs = all(n.forward_ms or n.backward_ms or n.parameter_bytes for n in costs.nodes)
            below += step < best.orders * (1 - 1e-9) and weighs
            complete.append((step / best.orders - 1 if best.orders else 0.0, best.orders / low - 1 if low else 0.0))
    yield f"{made} graphs: bound above the optimum in {above}, step below it in {below}"
    yield f"two stages a device are better in {chains}"
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
    parser.add_argument("--memory", type=float, default=inf, help="default: unlimited")
    parser.add_argument("--small", type=int, metavar="N")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first small graph")
    parser.add_argument("--orders", type=int, default=30_000, help="of plans with more orders of work, try named ones")
    arguments = parser.parse_args()
    if arguments.small:
        for line in count_small(arguments.small, arguments.first, arguments.orders):
            print(line, flush=True)
        return
    if arguments.folder is None:
        parser.error("give a folder with profiles, or --small")
    for m in arguments.microbatches:
        for line in tabulate(arguments.folder, m, arguments.cost_model, arguments.memory):
            print(line, flush=True)


if __name__ == "__main__":
    main()
