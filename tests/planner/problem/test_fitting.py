"""Plans under memory limits, compared with all chains of stages, each weighed to the byte."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest

from fxsplit.errors import PlanError, ScheduleError
from fxsplit.ir.facts.costs.costs import MEMORY, Costs, InputCost, NodeCost, TiedParameter
from fxsplit.ir.facts.costs.forwards import keep_forwards
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.price import Split, price_split
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from fxsplit.planner.search import search
from fxsplit.schedule.generators.catalogue import INFERENCE, SCHEDULES, Scheduler
from tests.support.graphs import assignments, chains, downsets


def draw_costs(r: random.Random) -> Costs:
    """Return a random graph of few nodes; some share a parameter, or fetch one of several values."""
    names = [f"n{i}" for i in range(r.randint(2, 6))]
    nodes: list[NodeCost] = []
    weighed = r.random() < 0.85
    for i, name in enumerate(names):
        before = [n for n in names[:i] if r.random() < 0.5] or names[max(i - 1, 0) : i]
        reads = (*(["x"] if not before or r.random() < 0.2 else []), *before)
        part = bool(before) and r.random() < 0.15
        size = r.choice([0, r.randint(0, 400)])
        peak = r.randint(0, 800)
        figures = {
            "forward_peak_bytes": peak, "backward_peak_bytes": r.randint(0, 900), "unkept_bytes": r.randint(0, size),
            "halved_peak_bytes": r.randint(0, 600), "storage_bytes": size, "handed_bytes": r.choice([0, 8]),
        }  # fmt: skip
        if r.random() < 0.5:
            figures |= {"late_peak_bytes": r.randint(1, 300), "waiting_bytes": r.randint(0, 300)}
        if r.random() < 0.3:
            figures |= {"lent_bytes": r.randint(0, 1200)}
        assert set(figures) <= set(MEMORY)
        nodes.append(
            NodeCost(
                name,
                "call_function:getitem" if part else "call_function:f",
                "",
                f"f{i}",
                (before[-1], *(n for n in reads if n != before[-1])) if part else reads,
                float(r.randint(1, 9)),
                float(r.randint(0, 9)),
                size,
                r.choice([0, size]),
                r.randint(0, 500),
                r.choice([0, r.randint(0, 300)]),
                r.choice([0, r.randint(0, 50)]),
                **(figures if weighed else {}),  # type: ignore[arg-type]
            )
        )
    # Some memory is kept only for later nodes, and some values are views.
    for i, one in enumerate(nodes[:-1] if weighed else ()):
        if r.random() < 0.4:
            later = r.choice(names[i + 1 :])
            nodes[i] = replace(one, kept_for=later, kept_for_bytes=r.randint(0, int(one.kept_bytes)))
    for i, one in enumerate(nodes if weighed else ()):
        owners = [n for n in one.inputs if n == "x" or not nodes[names.index(n)].lies_in]
        if owners and r.random() < 0.25:
            nodes[i] = replace(one, lies_in=r.choice(owners))
    tied = []
    if r.random() < 0.5:
        users = r.sample(range(len(nodes)), r.randint(2, len(nodes)))
        size = r.randint(1, 400)
        for i in users:
            nodes[i] = replace(nodes[i], parameter_bytes=nodes[i].parameter_bytes + size)
        tied = [TiedParameter(size, 0, tuple(names[i] for i in sorted(users)))]
    outputs = tuple(sorted({names[-1], *r.sample(names, r.randint(0, 1))}))
    return Costs(tuple(nodes), (InputCost("x", r.randint(0, 300), 0),), outputs, rows=1, tied=tuple(tied))


def draw_task(r: random.Random) -> tuple[Costs, Machine, Workload, Options]:
    """Return a random graph with a schedule, and devices with a memory close to some stage's need."""
    costs, count = draw_costs(r), r.randint(1, 3)
    name = r.choice([*SCHEDULES, INFERENCE, "1F1B"])
    if name == INFERENCE:
        costs = keep_forwards(costs)
    try:
        machine, workload = Scheduler(name, count).lay_out(Machine.planned(count), count * r.randint(1, 2))
    except ScheduleError:
        return draw_task(r)
    # A brute search over many stages takes long.
    if len(machine) > 3:
        return draw_task(r)
    models = ["forwarded"] * 4 + ["overlapped"] + ["replicated"] * (not workload.replicated)
    options = Options(
        use_all=r.random() < 0.5,
        optimizer_factor=r.choice([0.0, 1.0, 2.0, 0.3]),
        model=r.choice(models),
        recompute=r.choice(["never", "never", "always", "auto"]) if name != INFERENCE else "never",
    )
    if workload.may_idle:
        workload = replace(workload, may_idle=False)
    found = []
    for chain in itertools.islice(list_splits(costs, machine, options), 40):
        found += [s.memory_bytes for s in price_split(costs, machine, workload, chain, options.costs)]
    least = sorted(found)[: max(1, len(found) // 2)] or [1.0]
    memory = [r.choice(least) * r.choice([1.0, 1.0, 1.3]) if r.random() < 0.9 else inf for _ in machine.devices]
    if r.random() < 0.5:
        memory = memory[:1] * len(memory)
    devices = tuple(replace(d, memory_bytes=max(m, 1.0)) for d, m in zip(machine.devices, memory, strict=True))
    return costs, Machine(devices, machine.links), workload, options


def list_splits(costs: Costs, machine: Machine, options: Options) -> Iterator[Split]:
    """Yield every split of a graph into stages, with devices and recompute flags."""
    sets = downsets(costs)
    ways = {"never": (False,), "always": (True,), "auto": (False, True)}[options.recompute]
    for n_stages in range(1, len(machine) + 1):
        for homes in assignments(machine, options, n_stages):
            for chain in chains(sets, n_stages):
                stages = [[n.name for n in costs.nodes if n.name in b - a] for a, b in itertools.pairwise(chain)]
                for again in itertools.product(ways, repeat=n_stages):
                    yield list(zip(stages, homes, again, strict=True))


def find_best(costs: Costs, machine: Machine, workload: Workload, options: Options) -> float:
    """Return the bottleneck of the best split that fits, or infinity if none does."""
    best = inf
    for split in list_splits(costs, machine, options):
        stages = price_split(costs, machine, workload, split, options.costs)
        if all(s.memory_bytes <= machine.devices[d].memory_bytes for s in stages for d in s.devices):
            best = min(best, max(s.load_ms for s in stages))
    return best


def try_case(seed: int) -> str:
    """Plan a random case and return its kind. Fails unless the plan is the best of all that fit."""
    r = random.Random(seed)
    costs, machine, workload, options = draw_task(r)
    best = find_best(costs, machine, workload, options)
    try:
        plan = Planner(costs).plan(machine, workload, options)
    except PlanError as error:
        assert best == inf or "nodes that cuts can separate" in str(error), (seed, best, str(error))
        return "refused"
    assert plan.bottleneck_ms == pytest.approx(best, rel=1e-9) and plan.optimal, (seed, best, str(plan))
    for stage in plan.stages:
        assert all(stage.memory_bytes <= machine.devices[d].memory_bytes for d in stage.devices), seed
    unlimited = replace(machine, devices=tuple(replace(d, memory_bytes=inf) for d in machine.devices))
    free = Planner(costs).plan(unlimited, workload, options).bottleneck_ms
    return "bound" if free < plan.bottleneck_ms * (1 - 1e-9) else "free"


@pytest.mark.parametrize("small", [600, 0])
def test_the_plan_is_the_best_of_all_that_fit(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By both solvers, under all schedules, with parameters that several nodes share."""
    monkeypatch.setattr(search, "SMALL", small)
    found = [try_case(seed) for seed in range(60)]
    assert min(found.count(kind) for kind in ("refused", "bound", "free")) >= 5
