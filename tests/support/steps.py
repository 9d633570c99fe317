"""Exact referee of plans for the shortest step: it tries all stages, replicas and orders of work of a small graph.

A *line* is a plan with one stage a device, or with replicas of a stage on neighbouring devices. The stages of a line
lie between two downsets, which are sets of nodes that hold their members' inputs. The stages cost what `price_split`
says. An *order* is a sequence of actions for each device. At any time a device has done at least as many forwards as
input gradients, and at least as many input gradients as weight gradients. Microbatches keep their order on a device,
since they are all alike. The simulator checks the best order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from math import isclose, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import CostModel, price_split
from fxsplit.schedule.action import REDUCE, Action
from fxsplit.schedule.generators.catalogue import Scheduler
from fxsplit.schedule.generators.synchronous import count_in_flight, schedule_replicas
from fxsplit.schedule.of_plan import read_times
from fxsplit.schedule.schedule import Homes, Schedule
from fxsplit.schedule.simulation.simulate import Times, simulate
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


def try_all_orders(plan: Plan, homes: Homes, m: int, most: int) -> float | None:
    """Return the shortest step of a plan over all orders, in ms; None if there are more than `most`."""
    # A replica takes every r-th microbatch.
    own = [len(range(j, m, len(home))) for home in homes for j in range(len(home))]
    if max(own) > 4:
        return None
    tables = [list_sequences(count) for count in own]
    if prod(len(table) for table in tables) > most:
        return None
    together = np.zeros((len(own), max(map(len, tables)), 3 * max(own)), np.int64)
    for d, table in enumerate(tables):
        together[d, : len(table), : 3 * own[d]] = table
    times = read_times(plan, Schedule("", m, homes, ()))
    figures = [times.forward_ms, np.subtract(times.backward_ms, times.weight_ms), times.weight_ms, times.reduce_ms]
    numbers = np.array([len(home) for home in homes], np.int64)
    counts = np.array([len(table) for table in tables], np.int64)
    step, chosen = compile_kernel(run_all)(np.array(figures, float), numbers, m, together, counts, np.array(own) * 3)
    _check(homes, m, [table[i] for table, i in zip(tables, chosen, strict=True)], times, float(step))
    return float(step)


def _check(homes: Homes, m: int, sequences: Sequence[Any], times: Times, step: float) -> None:
    """Assert that the simulator agrees on the step of an order."""
    rows: list[tuple[Action, ...]] = []
    for s, home in enumerate(homes):
        for j in range(len(home)):
            counts, row = [j, j, j], []
            for kind in sequences[len(rows)]:
                row.append(Action(s, "FIW"[kind], counts[kind], j))
                counts[kind] += len(home)
            rows.append((*row, *[Action(s, REDUCE, replica=j)] * (len(home) > 1)))
    assert isclose(simulate(Schedule("", m, homes, tuple(rows)), times).step_ms, step, rel_tol=1e-9, abs_tol=1e-12)


@cache
def list_sequences(count: int) -> Ints:
    """Return every order of `count` F (0), I (1) and W (2) each on one device, int64 [orders, 3 count]."""
    found: list[tuple[int, ...]] = []

    def go_on(order: tuple[int, ...], done: tuple[int, int, int]) -> None:
        if len(order) == 3 * count:
            found.append(order)
        for kind in range(3):
            if done[kind] < count and (kind == 0 or done[kind] < done[kind - 1]):
                go_on((*order, kind), (*done[:kind], done[kind] + 1, *done[kind + 1 :]))  # type: ignore[arg-type]

    go_on((), (0, 0, 0))
    return np.array(found, np.int64).reshape(len(found), 3 * count)


def run_all(times: Any, replicas: Ints, m: int, tables: Ints, counts: Ints, lengths: Ints) -> tuple[float, Ints]:
    """Return the shortest step over the product of the devices' sequences, and the place of each in its table.

    `times` are F, I, W and REDUCE of each stage; a kernel for numba.
    """
    n, k = counts.size, replicas.size
    at, chosen = np.zeros(n, np.int64), np.zeros(n, np.int64)
    best = np.inf
    done, free, turn = np.zeros(n, np.int64), np.zeros(n), np.zeros((n, 3), np.int64)
    ends = np.zeros((2, k, m))
    while True:
        done[:], free[:], ends[:] = 0, 0.0, -1.0
        d = 0
        for s in range(k):
            for j in range(replicas[s]):
                turn[d, :] = j
                d += 1
        moved = True
        while moved:
            moved = False
            d = 0
            for s in range(k):
                for _ in range(replicas[s]):
                    while done[d] < lengths[d]:
                        kind = tables[d, at[d], done[d]]
                        i = turn[d, kind]
                        ready = 0.0
                        if kind == 0 and s:
                            ready = ends[0, s - 1, i]
                        if kind == 1 and s + 1 < k:
                            ready = ends[1, s + 1, i]
                        if ready < 0.0:
                            break
                        free[d] = max(free[d], ready) + times[kind, s]
                        if kind < 2:
                            ends[kind, s, i] = free[d]
                        turn[d, kind] += replicas[s]
                        done[d] += 1
                        moved = True
                    d += 1
        # Devices that wait for each other never end.
        if done.sum() == lengths.sum():
            step, d = 0.0, 0
            for s in range(k):
                for _ in range(replicas[s]):
                    step = max(step, free[d] + times[3, s] * (replicas[s] > 1))
                    d += 1
            if step < best:
                best = step
                chosen[:] = at
        d = 0
        while d < n:
            at[d] += 1
            if at[d] < counts[d]:
                break
            at[d] = 0
            d += 1
        if d == n:
            return best, chosen
