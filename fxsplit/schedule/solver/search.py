"""Search: the schedule with the shortest step within memory, with a bound of how short a step can be.

A search begins with the orders of named schedules and of list scheduling (starts.py). Annealing (annealing.py) changes
an order until its step meets the bound (heads.py and windows.py) or the time is over.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from math import inf
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np

from fxsplit.errors import ScheduleError
from fxsplit.schedule.action import FORWARD, INPUT_GRADIENT, RELEASES, WEIGHT_GRADIENT
from fxsplit.schedule.generators.catalogue import MOST_ACTIONS, RUNNABLE, SEARCH, generate
from fxsplit.schedule.generators.fill import evaluate, find_step, list_rules, read_kinds, write_schedule
from fxsplit.schedule.homes import deal_in_turn, go_there_and_back, line
from fxsplit.schedule.kernels import compile_kernels
from fxsplit.schedule.kernels.instance import Instance, Ints, make_instance
from fxsplit.schedule.schedule import Homes, Schedule
from fxsplit.schedule.simulation.simulate import Times, check_times, simulate
from fxsplit.schedule.solver.annealing import (
    DEEP,
    ENDING,
    FINE,
    Candidate,
    find_best,
    improve,
    lengthen,
    list_settings,
)
from fxsplit.schedule.solver.heads import HeadsAndTails, bound_by_memory, bound_by_ways, bound_by_work, find_heads
from fxsplit.schedule.solver.starts import list_low_memory_starts, list_repeating_starts, list_starts
from fxsplit.schedule.solver.windows import WindowBound, prove_bound
from fxsplit.system.figures import show

Placement = Literal["loop", "v"]
"""Where second stages go, in torch's words: `loop` begins again at the first device, `v` goes back from the last."""

PROVEN = 1e-6
"""A step whose gap is at most this is called optimal."""
CLOSE = 4e-7
"""A search ends at a step that is longer than the bound by at most this share. The two are sums in different orders, so
their last digits may differ."""
SHORT_ACTIONS, SHORT_S, LONG_S = 4_000, 2.0, 10.0
"""The default time limit in seconds, up to this number of actions and above."""
RULES = ((0.0, 0.0), (0.5, 0.5), (0.9, 0.0), (0.0, 0.9))
"""Rules of gaps (see kernels/orders.py), of the first device and of the last: the pairs to try on every start."""
FINE_RULES = tuple((first, last) for first in (0.0, 0.3, 0.6, 0.9) for last in (0.0, 0.3, 0.6, 0.9))
"""The pairs of rules to try on the best start."""
FEW_STATES, MANY_STATES = 2_000_000, 40_000_000
"""Numbers of states (see windows.py). With at most FEW_STATES in all, windows prove a bound before any annealing. With
more, they do so after FIRST_TURNS annealings, unless a device has more than MANY_STATES."""
RIVAL = 1.03
"""A start is annealed beside the best one if its step is at most this many times as long."""
FIRST_TURNS = 2
"""How many annealings come before windows with many states. A number and no time, so that results repeat."""


@dataclass(frozen=True)
class SearchResult:
    """A schedule with its simulated step, and a bound: no schedule of these stages within this memory is faster."""

    schedule: Schedule
    step_ms: float
    bound_ms: float

    @property
    def gap(self) -> float:
        """How far the step may be from the shortest one, as a share of the step; 0 if it is proven optimal."""
        return (self.step_ms - self.bound_ms) / self.step_ms if self.step_ms else 0.0

    @property
    def standing(self) -> str:
        """The proof in words: "optimal", or "gap 3.10 %"."""
        return "optimal" if self.gap <= PROVEN else f"gap {100 * self.gap:.2f} %"

    def __str__(self) -> str:
        return f"step {self.step_ms:.3f} ms, lower bound {self.bound_ms:.3f} ms, {self.standing}"


def search(
    times: Times,
    *,
    n_devices: int,
    n_microbatches: int,
    stages_per_device: int = 1,
    placement: Placement = "v",
    memory: float | Sequence[float] | None = None,
    kept_for_weights: float | Sequence[float] = 1.0,
    time_limit_s: float | None = None,
    seed: int = 0,
    held: Sequence[float] | None = None,
) -> SearchResult:
    """Search for the schedule with the shortest step, and a proof of how close it is.

    - `times`: of the stages. Launches count in the step, and not in the bound. Reductions and optimizer steps count in
      neither
    - `stages_per_device`: 1, or 2 by `placement`: "v" down the line of devices and back, "loop" twice down the line
    - `memory`: the most activations that a device may hold (default: unlimited). The unit is one microbatch in all
      stages of the device. One number, or one for each device
    - `kept_for_weights`: the share of a stage's activations that only its weight gradient frees; the input gradient
      frees the rest. One number, or one for each stage
    - `held`: how much of its device's activations each stage keeps, as a share (default: equal shares)
    - `time_limit_s`: the search ends after so many seconds (default: 2 up to 4,000 actions, else 10), and earlier if
      the schedule is proven optimal. The time to compile the kernels does not count
    - `seed`: another seed may find another schedule. The same seed finds the same schedule, unless the time limit ends
      the search

    The result is never slower than a named schedule of the same stages that fits the memory.

    Raises ScheduleError for numbers out of range, and for times of another number of stages.
    """
    homes = _place(n_devices, n_microbatches, stages_per_device, placement)
    if not _is_whole(seed):
        raise ScheduleError(f"search: seed={show(seed)}: give a whole number")
    check_times(Schedule(SEARCH, n_microbatches, homes, ()), times)
    _check_times(times)
    _check_amounts("memory", memory, n_devices)
    _check_amounts("kept_for_weights", kept_for_weights, len(homes))
    _check_amounts("held", [held] if isinstance(held, Real) else held, len(homes))
    one = make_instance(homes, n_microbatches, times, memory, kept_for_weights, held)
    _check(one, time_limit_s)
    named = [s for s in _list_named(homes, n_microbatches, times, stages_per_device) if fits(one, s)]
    warm_up()
    usual = SHORT_S if one.n_actions <= SHORT_ACTIONS else LONG_S
    limit_s = usual if time_limit_s is None else time_limit_s
    found, bound = _search(one, named, homes, seed, time.monotonic() + limit_s)
    schedules = [*named, *([] if found is None else [found])]
    # Sums in another order differ in their last digits: the simulation decides.
    schedule = replace(min(schedules, key=lambda schedule: find_step(schedule, times)), name=SEARCH)
    step = simulate(schedule, times).step_ms
    return SearchResult(schedule, step, min(float(bound), step))


def fits(one: Instance, schedule: Schedule) -> bool:
    """Return whether a schedule of an instance's stages stays within the memory of each device."""
    for row, memory in zip(schedule.actions, one.memory, strict=True):
        used = 0.0
        for action in row:
            held, late = one.held[action.stage], one.late[action.stage]
            if action.op == FORWARD:
                used += held
            elif action.op == INPUT_GRADIENT:
                used -= held - late
            elif action.op in RELEASES:
                used -= late if action.op == WEIGHT_GRADIENT else held
            if used > memory + 1e-9:
                return False
    return True


def is_warm() -> bool:
    """Return whether the machine code of the kernels is loaded, so that a search begins at once."""
    return warm_up.cache_info().currsize > 0


@cache
def warm_up() -> None:
    """Compile the kernels, by a search of a step or two."""
    compile_kernels()
    one = make_instance(go_there_and_back(2), 3, Times.unit(4))
    start = find_best(one, list_starts(one, v_shaped=True), list(list_rules(one, RULES)), 0.0, inf)
    assert start is not None
    for setting in (ENDING, FINE[0]):
        improve(one, start, 0.0, setting._replace(length=1, fewest=1), 0, inf)
    WindowBound(one, find_heads(one), MANY_STATES).refutes(start.step, inf)


def _place(n_devices: int, n_microbatches: int, stages_per_device: int, placement: str) -> Homes:
    """Return the device of each stage; raises ScheduleError for numbers out of range."""
    for what, count in (("n_devices", n_devices), ("n_microbatches", n_microbatches)):
        if not _is_whole(count) or count < 1:
            raise ScheduleError(f"search: {what}={show(count)}: give a whole number of at least 1")
    actions = 3 * n_devices * n_microbatches * 2
    if actions > MOST_ACTIONS:
        raise ScheduleError(
            f"search: n_devices={show(n_devices)} and n_microbatches={show(n_microbatches)} are up to {show(actions)} "
            f"actions, more than {MOST_ACTIONS}: give fewer microbatches"
        )
    if stages_per_device not in (1, 2):
        raise ScheduleError(f"search: stages_per_device={show(stages_per_device)}: give 1 or 2")
    if placement not in ("loop", "v"):
        raise ScheduleError(f'search: placement={show(placement)}: give "loop" or "v"')
    return place_stages(n_devices, stages_per_device, placement)


def place_stages(n_devices: int, stages_per_device: int, placement: str) -> Homes:
    """Return the device of each stage: one stage a device, or two as a "v" or a "loop"."""
    if stages_per_device == 1:
        return line(n_devices)
    return go_there_and_back(n_devices) if placement == "v" else deal_in_turn(n_devices, 2)


def _is_whole(value: object) -> bool:
    """Return whether a value is a whole number, of Python or numpy."""
    return isinstance(value, Integral)


def _check_times(times: Times) -> None:
    """Raise ScheduleError unless times are finite and at least 0, one for each stage, and transfers asynchronous."""
    if times.transfers == "blocking":
        raise ScheduleError("search: transfers='blocking': orders are searched for asynchronous transfers only")
    for what in (field.name for field in fields(times) if field.name != "transfers"):
        found = getattr(times, what)
        _check_amounts(what, found or 0.0, len(times.forward_ms))
        if inf in found:
            raise ScheduleError(f"search: {what} has an infinite time: give finite ones")
    for s, (backward, weight) in enumerate(zip(times.backward_ms, times.weight_ms, strict=False)):
        if weight > backward:
            raise ScheduleError(
                f"search: weight_ms={show(weight)} of stage {s} is more than its backward_ms={backward}"
            )


def _check_amounts(what: str, given: Any, count: int) -> None:
    """Raise ScheduleError unless `given` is None, a number of at least 0, or a list of `count` of them."""
    if given is None:
        return
    single = isinstance(given, Real)
    values: list[Any] = [given] if single else list(given)
    if any(type(value) is bool or not isinstance(value, (int, float, np.number)) or not value >= 0 for value in values):
        raise ScheduleError(f"search: {what}={show(given)}: give numbers of at least 0")
    if not single and len(values) != count:
        raise ScheduleError(f"search: {what} has {len(values)} numbers: give {count}")


def _check(one: Instance, time_limit_s: float | None) -> None:
    """Raise ScheduleError for memory, shares and time limits out of range."""
    for r, memory in enumerate(one.memory):
        need = float(one.held[one.stages[r]].sum())
        if not memory >= need - 1e-9:
            raise ScheduleError(
                f"search: memory={show(float(memory))} of device {r}: one microbatch needs {show(need)}: give more"
            )
    if one.held.max() > 1 + 1e-9 or (one.late > one.held + 1e-9).any():
        raise ScheduleError("search: held and kept_for_weights are shares: give numbers of 0 to 1")
    if time_limit_s is not None and not (isinstance(time_limit_s, float | int) and time_limit_s > 0):
        raise ScheduleError(f"search: time_limit_s={show(time_limit_s)}: give seconds above 0")


def _list_named(homes: Homes, n_microbatches: int, times: Times, stages_per_device: int) -> Iterator[Schedule]:
    """Yield the named schedules of these stages that this number of microbatches allows."""
    n_devices = len(homes) // stages_per_device
    for name in RUNNABLE:
        with suppress(ScheduleError):
            # Homes do not depend on microbatches or times.
            if generate(name, n_devices, n_devices, stages_per_device).homes == homes:
                yield generate(name, n_devices, n_microbatches, stages_per_device, times)


def _search(
    one: Instance, named: list[Schedule], homes: Homes, seed: int, deadline: float
) -> tuple[Schedule | None, float]:
    """Return the best schedule found, or None if there is none, and the bound of a step in ms."""
    heads = find_heads(one)
    low = max(bound_by_ways(one, heads), bound_by_work(one, heads), bound_by_memory(one, heads))
    starts = _list_bests(one, named, homes, heads, low * (1 + CLOSE), deadline)
    if not starts:
        return None, low
    best = min(starts, key=lambda candidate: candidate.step)
    if best.step > low * (1 + CLOSE):
        proofs = WindowBound(one, heads, MANY_STATES)
        # Windows with many states take seconds, and annealing often meets the other bounds before.
        first = 0 if proofs.size <= FEW_STATES else FIRST_TURNS
        rivals = [start for start in starts if start.step <= RIVAL * best.step]
        if len(rivals) > 1:
            # The slower start may lead to the better order.
            short = lengthen(DEEP, one)
            tried = [improve(one, rival, low * (1 + CLOSE), short, seed * 1000, deadline) for rival in rivals]
            best = min(tried, key=lambda candidate: candidate.step)
    settings, turn, proven = list_settings(one), 0, False
    while best.step > low * (1 + CLOSE) and time.monotonic() < deadline:
        if not proven and proofs.complete and turn >= first:
            low, proven = prove_bound(proofs, low, best.step, deadline), True
            continue
        found = improve(one, best, low * (1 + CLOSE), next(settings), seed * 1000 + turn, deadline)
        best = min(best, found, key=lambda candidate: candidate.step)
        turn += 1
    _, state = evaluate(one, best.orders, best.rules)
    return write_schedule(one, best.orders, state, homes), low


def _list_bests(
    one: Instance, named: list[Schedule], homes: Homes, heads: HeadsAndTails, goal: float, deadline: float
) -> list[Candidate]:
    """Return the starts of a search: the best of each list of starts, or only one if its step reaches the goal."""

    def list_all() -> Iterator[Ints]:
        yield from (read_kinds(one, schedule.actions) for schedule in named)
        yield from list_starts(one, v_shaped=homes == go_there_and_back(one.n_devices))
        if one.memory.min() < one.n_devices:
            yield from list_low_memory_starts(one)

    lists = [list_all()]
    if one.stages.shape[1] == 2 and one.memory.min() < one.n_devices:
        lists.append(list_repeating_starts(one, heads.head))
    bests: list[Candidate] = []
    for found in lists:
        best = find_best(one, found, list(list_rules(one, RULES)), goal, deadline)
        if best is not None and best.step > goal:
            again = find_best(one, iter([best.orders]), list(list_rules(one, FINE_RULES)), goal, deadline)
            best = best if again is None else min(best, again, key=lambda candidate: candidate.step)
        if best is not None:
            bests.append(best)
            if best.step <= goal:
                return [best]
    return bests
