"""Exact referee of plans for the shortest step: it tries all stages, replicas and orders of work of a small graph.

A *line* is a plan with one stage a device, or with replicas of a stage on neighbouring devices. The stages of a line
lie between two downsets, which are sets of nodes that hold their members' inputs. The stages cost what `price_split`
says. An *order* is a sequence of actions for each device. At any time a device has done at least as many forwards as
input gradients, and at least as many input gradients as weight gradients. Microbatches keep their order on a device,
since they are all alike. The simulator checks the best order.

A *chain* is a plan with two stages on each of its devices, as a V or as a loop. Each of its stages has a node that
takes time or has parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from math import isclose, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxsplit.errors import ScheduleError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import CostModel, price_split
from fxsplit.schedule.action import REDUCE, Action
from fxsplit.schedule.generators.catalogue import Scheduler, generate
from fxsplit.schedule.generators.synchronous import count_in_flight, schedule_replicas
from fxsplit.schedule.homes import deal_in_turn, go_there_and_back
from fxsplit.schedule.of_plan import read_times
from fxsplit.schedule.schedule import Homes, Schedule
from fxsplit.schedule.simulation.simulate import Times, simulate
from fxsplit.schedule.solver.search import search
from fxsplit.system.kernels import compile_kernel
from tests.support.graphs import chains, downsets

NAMED = ("GPipe", "1F1B", "ZB-H1")
Ints = NDArray[np.int64]


class Referee(NamedTuple):
    """The shortest step over all lines of a graph, in ms.

    - `orders`: over all orders of a line if they are at most `most`, and otherwise over its named schedules
    - `named`: over the named schedules of all lines
    - `complete`: whether all orders of all lines were tried
    - `lines`: the number of lines
    """

    orders: float
    named: float
    complete: bool
    lines: int


def find_shortest(costs: Costs, machine: Machine, m: int, *, replicas: bool, most: int = 2_000) -> Referee:
    """Return the shortest step of m microbatches on a machine, over all plans with one stage a device.

    For a line with more than `most` orders, only the named schedules are tried. Launches of hosts are left out.
    """
    nodes = tuple(replace(n, forward_launch_ms=0.0, backward_launch_ms=0.0) for n in costs.nodes)
    costs = replace(costs, nodes=nodes)
    shortest = named = float("inf")
    complete, count = True, 0
    for plan in list_lines(costs, machine, m, replicas=replicas):
        count += 1
        homes = tuple(stage.devices for stage in plan.stages)
        for name in NAMED:
            schedule = schedule_replicas(name, homes, m, count_in_flight(homes))
            named = min(named, simulate(schedule, read_times(plan, schedule)).step_ms)
        found = try_all_orders(plan, homes, m, most)
        complete &= found is not None
        shortest = min(shortest, named, named if found is None else found)
    return Referee(shortest, named, complete, count)


def find_best_that_fits(
    costs: Costs, machine: Machine, m: int, *, replicas: bool, recompute: str = "never"
) -> float | None:
    """Return the shortest step over all lines and named schedules that stay in memory, in ms; None if none does.

    The schedules hold as many microbatches as keep all devices busy, or fewer.
    """
    best, again = None, {"never": (False,), "always": (True,), "auto": (False, True)}[recompute]
    for plan in list_lines(costs, machine, m, replicas=replicas):
        homes = tuple(stage.devices for stage in plan.stages)
        counts = count_in_flight(homes)
        tries = [(name, fewer) for name in NAMED for fewer in range(max(counts) if name != "GPipe" else 1)]
        for name, fewer in tries:
            schedule = schedule_replicas(name, homes, m, [max(1, count - fewer) for count in counts])
            workload = Scheduler.of(schedule).describe(len(machine), m)
            for flags in product(again, repeat=len(homes)):
                split = [(s.nodes, s.devices, flag) for s, flag in zip(plan.stages, flags, strict=True)]
                priced = price_split(costs, machine, workload, split, plan.model)
                if any(s.memory_bytes > machine.devices[0].memory_bytes for s in priced):
                    continue
                step = simulate(schedule, read_times(replace(plan, stages=priced), schedule)).step_ms
                best = step if best is None else min(best, step)
    return best


def list_lines(costs: Costs, machine: Machine, m: int, *, replicas: bool) -> Iterator[Plan]:
    """Yield every plan with one stage a device, replicas on neighbours, and the last devices idle."""
    _, workload = Scheduler("1F1B", len(machine)).lay_out(machine, m)
    model = CostModel("replicated")
    sets = downsets(costs)
    for k in range(1, len(machine) + 1):
        counts = [c for c in product(range(1, len(machine) + 1 if replicas else 2), repeat=k) if sum(c) <= len(machine)]
        for chain in chains(sets, k):
            nodes = [[n.name for n in costs.nodes if n.name in b - a] for a, b in pairwise(chain)]
            for count in counts:
                ends = np.cumsum([0, *count]).tolist()
                homes = [tuple(range(a, b)) for a, b in pairwise(ends)]
                split = [(names, home, False) for names, home in zip(nodes, homes, strict=True)]
                stages = price_split(costs, machine, workload, split, model)
                yield Plan.assemble(stages, costs, machine, workload, model, lower_bound_ms=0.0, n_states=0)


def find_shortest_chain(
    costs: Costs, machine: Machine, m: int, *, most: int = 2_000, search_s: float = 0.01
) -> Referee:
    """Return the shortest step of m microbatches over all plans with two stages a device, infinite if there is none.

    For a chain with more than `most` orders, named schedules and an order that was searched for `search_s` seconds are
    tried. Launches of hosts are left out.
    """
    nodes = tuple(replace(n, forward_launch_ms=0.0, backward_launch_ms=0.0) for n in costs.nodes)
    shortest = named = float("inf")
    complete, count = True, 0
    for plan in list_chains(replace(costs, nodes=nodes), machine, m):
        count += 1
        assert plan.machine is not None
        homes = plan.machine.homes
        k = len(homes) // 2
        times = read_times(plan, Schedule("", m, homes, ()))
        for name in ("LoopedBFS", "Interleaved1F1B") if homes[0] != homes[-1] else ("ZBVZeroBubble", "V-Min"):
            with suppress(ScheduleError):
                named = min(named, simulate(generate(name, k, m, None, times), times).step_ms)
        found = try_all_orders(plan, homes, m, most)
        complete &= found is not None
        if found is None:
            placement = "loop" if homes[0] != homes[-1] else "v"
            stated = {"n_devices": k, "n_microbatches": m, "stages_per_device": 2, "placement": placement}
            found = search(times, **stated, time_limit_s=search_s).step_ms  # type: ignore[arg-type]
        shortest = min(shortest, found)
    return Referee(min(shortest, named), named, complete, count)


def list_chains(costs: Costs, machine: Machine, m: int) -> Iterator[Plan]:
    """Yield every plan with two stages a device, as a V and as a loop, in which each stage has a node of some cost."""
    sets, model = downsets(costs), CostModel("replicated")
    for k in range(2, len(machine) + 1):
        for chain in chains(sets, 2 * k):
            nodes = [[n for n in costs.nodes if n.name in b - a] for a, b in pairwise(chain)]
            if not all(any(n.forward_ms + n.backward_ms + n.parameter_bytes > 0 for n in own) for own in nodes):
                continue
            split = [([n.name for n in own], (s,), False) for s, own in enumerate(nodes)]
            for homes in (go_there_and_back(k), deal_in_turn(k, 2)):
                unrolled = machine.unrolled(homes)
                workload = Workload("search", m, {2 * k: (m,) * 2 * k})
                stages = price_split(costs, unrolled, workload, split, model)
                yield Plan.assemble(stages, costs, unrolled, workload, model, lower_bound_ms=0.0, n_states=0)


def try_all_orders(plan: Plan, homes: Homes, m: int, most: int) -> float | None:
    """Return the shortest step of a plan over all orders, in ms; None if there are more than `most`."""
    devices = 1 + max(d for home in homes for d in home)
    # The stages of each device, its place among their replicas, and how many they are.
    own = [[s for s, home in enumerate(homes) if d in home] for d in range(devices)]
    replicas = [len(homes[stages[0]]) for stages in own]
    first = [homes[stages[0]].index(d) for d, stages in enumerate(own)]
    # A replica takes every r-th microbatch.
    counts = [len(range(j, m, r)) for j, r in zip(first, replicas, strict=True)]
    if max(counts) > (4 if len(own[0]) == 1 else 2):
        return None
    tables = [list_sequences(count, len(stages)) for count, stages in zip(counts, own, strict=True)]
    if prod(len(table) for table in tables) > most:
        return None
    together = np.zeros((devices, max(map(len, tables)), max(table.shape[1] for table in tables)), np.int64)
    for d, table in enumerate(tables):
        together[d, : len(table), : table.shape[1]] = table
    times = read_times(plan, Schedule("", m, homes, ()))
    figures = [times.forward_ms, np.subtract(times.backward_ms, times.weight_ms), times.weight_ms, times.reduce_ms]
    step, chosen = compile_kernel(run_all)(
        np.array(figures, float),
        np.array([(*stages, -1)[:2] for stages in own], np.int64),
        np.array([first, replicas], np.int64),
        m,
        together,
        np.array([table.shape for table in tables], np.int64),
    )
    sequences = [table[i] for table, i in zip(tables, chosen, strict=True)]
    _check(homes, m, own, sequences, times, float(step))
    return float(step)


def _check(
    homes: Homes, m: int, own: Sequence[Sequence[int]], sequences: Sequence[Any], times: Times, step: float
) -> None:
    """Assert that the simulator agrees on the step of an order."""
    rows: list[tuple[Action, ...]] = []
    for d, stages in enumerate(own):
        home = homes[stages[0]]
        j, row = home.index(d), []
        counts = [j] * 6
        for kind in sequences[d]:
            row.append(Action(stages[kind // 3], "FIW"[kind % 3], counts[kind], j))
            counts[kind] += len(home)
        rows.append((*row, *[Action(stages[0], REDUCE, replica=j)] * (len(home) > 1)))
    assert isclose(simulate(Schedule("", m, homes, tuple(rows)), times).step_ms, step, rel_tol=1e-9, abs_tol=1e-12)


@cache
def list_sequences(count: int, n_stages: int = 1) -> Ints:
    """Return every order of `count` F, I and W of each stage on one device, int64 [orders, actions].

    F, I and W are 0, 1 and 2, and 3, 4 and 5 of a second stage. The second stage has its F after those of the first
    stage, and its I before them.
    """
    before = {1: 0, 2: 1} if n_stages == 1 else {3: 0, 4: 3, 1: 4, 2: 1, 5: 4}
    kinds, found = 3 * n_stages, list[tuple[int, ...]]()

    def go_on(order: tuple[int, ...], done: tuple[int, ...]) -> None:
        if len(order) == kinds * count:
            found.append(order)
        for kind in range(kinds):
            if done[kind] < count and (kind == 0 or done[kind] < done[before[kind]]):
                go_on((*order, kind), (*done[:kind], done[kind] + 1, *done[kind + 1 :]))

    go_on((), (0,) * kinds)
    return np.array(found, np.int64).reshape(len(found), kinds * count)


def run_all(times: Any, own: Ints, shares: Ints, m: int, tables: Ints, shapes: Ints) -> tuple[float, Ints]:
    """Return the shortest step over the product of the devices' sequences, and the place of each in its table.

    `times` are F, I, W and REDUCE of each stage, `own` the stages of each device, `shares` its place among replicas and
    their number, `shapes` those of its table; a kernel for numba.
    """
    n, k = own.shape[0], times.shape[1]
    at, chosen = np.zeros(n, np.int64), np.zeros(n, np.int64)
    best = np.inf
    done, free, turn = np.zeros(n, np.int64), np.zeros(n), np.zeros((n, 6), np.int64)
    ends = np.zeros((2, k, m))
    while True:
        done[:], free[:], ends[:] = 0, 0.0, -1.0
        for d in range(n):
            turn[d, :] = shares[0, d]
        moved = True
        while moved:
            moved = False
            for d in range(n):
                while done[d] < shapes[d, 1]:
                    kind = tables[d, at[d], done[d]]
                    s, i = own[d, kind // 3], turn[d, kind]
                    ready = 0.0
                    if kind % 3 == 0 and s:
                        ready = ends[0, s - 1, i]
                    if kind % 3 == 1 and s + 1 < k:
                        ready = ends[1, s + 1, i]
                    if ready < 0.0:
                        break
                    free[d] = max(free[d], ready) + times[kind % 3, s]
                    if kind % 3 < 2:
                        ends[kind % 3, s, i] = free[d]
                    turn[d, kind] += shares[1, d]
                    done[d] += 1
                    moved = True
        # Devices that wait for each other never end.
        if done.sum() == shapes[:, 1].sum():
            step = 0.0
            for d in range(n):
                step = max(step, free[d] + times[3, own[d, 0]] * (shares[1, d] > 1))
            if step < best:
                best = step
                chosen[:] = at
        d = 0
        while d < n:
            at[d] += 1
            if at[d] < shapes[d, 0]:
                break
            at[d] = 0
            d += 1
        if d == n:
            return best, chosen
