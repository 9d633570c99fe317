"""The search problem: states, moves, and what each kind of move costs, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxsplit.errors import PlanError
from fxsplit.ir.facts.antichains import Antichains
from fxsplit.ir.facts.machine import Machine
from fxsplit.ir.facts.price import WEIGHT_COPIES, CostModel
from fxsplit.ir.facts.states import States
from fxsplit.ir.facts.workload import Workload
from fxsplit.planner import kernels
from fxsplit.planner.clock import Clock
from fxsplit.planner.moves import Move, Moves, powers

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
PairCosts = Callable[[int, NDArray[np.int64], NDArray[np.int64]], tuple[Floats, Bools]]
Path = list[tuple[int, Move]]
"""A chain of states: where each stage ends, and the move it is."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A chain of states is sought whose every stage has a small load and fits.

    `load(J, I) = max(end[I] - start[J], start_floor[J], end_floor[I])` and `space(J, I) = space_end[I] -
    space_start[J]` by kind of move, all float64 [kinds, states]; `kind[m]` is that of move m. `allowed` is bool
    [configurations, states]. `work` is float64 [states], each state's share of what is to be done; `done` and `left`
    float64 [configurations] how much of it the devices used and unused do per unit of load. `rates` (float64 [kinds,
    3]) are the work done in one ms, at most, and the ms that receiving and sending a byte takes, at least.
    """

    states: States
    moves: Moves
    kind: tuple[int, ...]
    start: Floats
    end: Floats
    start_floor: Floats
    end_floor: Floats
    space_start: Floats
    space_end: Floats
    space_low: Floats
    capacity: Floats
    rates: Floats
    allowed: Bools
    work: Floats
    done: Floats
    left: Floats
    may_idle: bool

    def __len__(self) -> int:
        return int(self.work.size)

    def test(self, threshold: float, clock: Clock | None = None) -> Path | None:
        """Return a chain whose every stage has load <= threshold, or None; raises OutOfTime."""
        return self.trace(*(clock or Clock()).run(lambda steps: self._reach(threshold, steps)))

    def _reach(self, threshold: float, steps: int) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
        """Return the kernel's tables, and how many steps it took of at most `steps`."""
        bounded = None
        if np.isfinite(self.capacity).any():
            bounded = (self.space_start, self.space_end, self.space_low, self.capacity)
        return kernels.reach(
            in_ptr=self.states.in_pointer,
            in_from=self.states.in_from,
            work=self.work,
            start=self.start,
            end=self.end,
            start_floor=self.start_floor,
            end_floor=self.end_floor,
            allowed=self.allowed,
            moves=self.table,
            done=self.done,
            left=self.left,
            may_idle=self.may_idle,
            threshold=threshold,
            steps=steps,
            bounded=bounded,
        )

    def trace(self, origin: NDArray[np.int32], via: NDArray[np.int32]) -> Path | None:
        """Return the chain that two tables (by configuration and state) lead back along, or None where none is full."""
        full = len(self) - 1
        at = next((q for q in sorted(self.moves.final) if origin[q, full] >= 0), None)
        if at is None:
            return None
        path: Path = []
        state = full
        while at != 0:
            move = self.moves.moves[via[at, state]]
            path.append((state, move))
            state, at = int(origin[at, state]), move.source
        return path[::-1]

    def loads(self, path: Path) -> list[float]:
        """Return every stage's load in a chain."""
        found, begin = [], 0
        for end, move in path:
            k = self.kind[self.moves.number[move]]
            load = self.end[k, end] - self.start[k, begin]
            found.append(float(max(load, self.start_floor[k, begin], self.end_floor[k, end])))
            begin = end
        return found

    def pair_costs(self, states: NDArray[np.int64]) -> PairCosts:
        """Return a function of (kind, starts, ends), which are positions in `states`: load, and whether it fits.

        Both are [starts, ends], for pairs that are nested and those that are not.
        """
        shared, rate = self.shared(states)

        def costs(kind: int, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[Floats, Bools]:
            a, b = states[starts], states[ends]
            load = self.end[kind][None, b] - self.start[kind][a, None]
            load = np.maximum(np.maximum(load, self.start_floor[kind][a, None]), self.end_floor[kind][None, b])
            if shared.size:
                load = load + rate[kind] * shared[np.ix_(starts, ends)]
            space = self.space_end[kind][None, b] - self.space_start[kind][a, None]
            return load, space <= self.capacity[kind]

        return costs

    def shared(self, states: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return bytes that every pair of `states` pays for besides, [J, I], and milliseconds a byte, by kind of move.

        Here there are none, and the first is empty.
        """
        return np.zeros((0, 0)), np.zeros_like(self.capacity)

    @cached_property
    def table(self) -> NDArray[np.int32]:
        """The moves as int32 [moves, 3]: from, to, kind."""
        return np.array([(m.source, m.target, k) for m, k in zip(self.moves.moves, self.kind, strict=True)], np.int32)

    @cached_property
    def live(self) -> Floats:
        """The bytes that cross each state."""
        return self.states.column("live_bytes") + self.states.column("live_gradient_bytes")

    def lower_bound(self, joined: bool = False) -> float:
        """Return a load that no chain's slowest stage can beat: all work shared evenly, or one edge's work alone.

        Where light blocks are `joined`, an edge's work might be parted, and only the first counts.
        """
        if not self.work[-1] > 0:
            return 0.0
        even = float(self.work[-1] / self.done.max())
        if joined:
            return even
        ends = np.repeat(np.arange(len(self)), np.diff(self.states.in_pointer))
        largest = float((self.work[ends] - self.work[self.states.in_from]).max(initial=0.0))
        quickest = max(self.done[m.target] - self.done[m.source] for m in self.moves.moves)
        return max(even, largest / float(quickest))

    def under(self, upper: float) -> Problem:
        """Return a problem with the same chains of loads up to `upper`, in figures of about that size."""
        return self

    def restricted(self, order: Sequence[int]) -> Problem:
        """Return the problem that has only the states of `order`, each of which contains the one before."""
        at = np.array(order, np.int64)
        n = at.size
        below = np.concatenate(([0], np.arange(n))).astype(np.int32), np.arange(n - 1, dtype=np.int32)
        by_state = ("start", "end", "start_floor", "end_floor", "space_start", "space_end", "space_low", "allowed")
        tables: dict[str, Any] = {name: np.ascontiguousarray(getattr(self, name)[:, at]) for name in by_state}
        return replace(self, states=States(self.states.features[at], *below), work=self.work[at], **tables)

    def without_memory(self) -> Problem:
        """Return the same problem for devices of unlimited memory."""
        return replace(self, capacity=np.full_like(self.capacity, inf))

    def for_excess(self) -> Problem:
        """Return the problem of exceeding the devices' memory by as little as possible."""
        finite = np.isfinite(self.capacity)[:, None]
        start, end = np.where(finite, self.space_start, 0.0), np.where(finite, self.space_end, 0.0)
        end = end - np.where(finite, self.capacity[:, None], 0.0)
        floor = np.full_like(self.start_floor, -inf)
        return replace(
            self.without_memory(),
            start=start,
            end=end,
            start_floor=floor,
            end_floor=floor,
            work=np.zeros_like(self.work),  # which says nothing about memory
            done=np.zeros_like(self.done),
            left=np.zeros_like(self.left),
        )


def pose_problem(
    states: States,
    chains: Antichains,
    machine: Machine,
    workload: Workload,
    model: CostModel,
    moves: Moves,
    pinned: Mapping[str, int],
) -> Problem:
    """Return the problem of cutting `states` along `moves`; its loads are those of `price`, less `direct` ones."""
    kinds: dict[tuple[float, ...], int] = {}
    kind = tuple(kinds.setdefault(_kind(machine, workload, model, moves, move), len(kinds)) for move in moves.moves)
    column = states.column
    own, live = column("forward_ms") + column("backward_ms"), column("live_bytes") + column("live_gradient_bytes")
    leaving = live.copy()
    if not workload.may_idle or (len(moves.final) > 1 and not moves.n_stages):
        leaving[-1] = 0.0  # whoever ends with everything is the last stage, or might be, and sends nothing on
    weights = column("parameter_bytes")
    shape = (len(kinds), len(states))
    start, end, space_start, space_end, space_low = (np.zeros(shape) for _ in range(5))
    start_floor, end_floor = np.full(shape, -inf), np.full(shape, -inf)
    for k, (speed, host, reduce, receive, send, in_flight, versions, again, _) in enumerate(kinds):
        busy = (column("host_ms") if host else own + again * column("forward_ms")) / speed + weights * reduce
        start[k], end[k] = busy, busy
        if model.name == "overlapped":
            start_floor[k], end_floor[k] = live * receive, leaving * send
        elif model.name != "direct":
            start[k], end[k] = busy - live * receive, busy + leaving * send
        held = weights * (WEIGHT_COPIES + model.optimizer_factor + versions - 1.0) + column("buffer_bytes")
        space_low[k] = held + (min(in_flight, 1) if again else in_flight) * column("kept_bytes")
        boundary = 0.0 if model.name == "direct" else in_flight * column("live_bytes")
        space_start[k], space_end[k] = space_low[k] - boundary, space_low[k] + boundary
    forwards = model.name != "direct"  # who sends directly may send less than is live
    rates = [(inf if k[1] else k[0], k[3] * forwards, k[4] * forwards) for k in kinds]
    work, host_speed = own, 1.0
    if any(d.host for d in machine.devices):
        work, host_speed = _work_with_hosts(states, chains)
    done, left = powers(machine, moves, host_speed)
    return Problem(
        states=states,
        moves=moves,
        kind=kind,
        start=start,
        end=end,
        start_floor=start_floor,
        end_floor=end_floor,
        space_start=space_start,
        space_end=space_end,
        space_low=space_low,
        capacity=np.array([k[-1] for k in kinds], np.float64),
        rates=np.array(rates, np.float64),
        allowed=_allowed(chains, pinned, moves, machine, several=model.name == "replicated"),
        work=work,
        done=np.array(done, np.float64),
        left=np.array(left, np.float64),
        may_idle=workload.may_idle,
    )


def _kind(machine: Machine, workload: Workload, model: CostModel, moves: Moves, move: Move) -> tuple[float, ...]:
    """Return what tells one kind of move from another: what it makes of times, bytes and memory."""
    devices = [machine.devices[d] for d in move.devices]
    first, last = move.devices[0], move.devices[-1]
    speed = len(devices) * min(d.speed for d in devices)
    receive = send = 0.0
    if model.traffic:
        receive = 0.0 if move.first else 1.0 / machine.bytes_per_ms(first, max(first - 1, 0))
        send = 0.0 if move.last else 1.0 / machine.bytes_per_ms(last, min(last + 1, len(machine) - 1))
    in_flight = workload.in_flight[moves.n_stages][move.rank] if moves.n_stages else 0
    versions = workload.versions_of(moves.n_stages)[move.rank] if moves.n_stages else 1
    capacity = min(d.memory_bytes for d in devices)
    host = float(devices[0].host)
    again = float(move.recompute)
    reduce = machine.reduce_ms_per_byte(move.devices)
    return speed, host, reduce, receive, send, in_flight, versions, again, capacity


def _work_with_hosts(states: States, chains: Antichains) -> tuple[Floats, float]:
    """Return work of which an accelerator does at most 1, and a host at most the second result, in one unit of time.

    With c the hosts' speed overall, a node's work is the smaller of its own time and c times its time on a host.
    """
    own, host = states.column("forward_ms") + states.column("backward_ms"), states.column("host_ms")
    speed = float(own[-1] / max(host[-1], 1e-9 * own[-1])) if own[-1] > 0 else 1.0  # any c is right; this one is tight
    alone = np.zeros((len(chains.blocks), 1))
    before = chains.parent[1:]
    alone[chains.last[1:], 0] = np.minimum(own[1:] - own[before], speed * (host[1:] - host[before]))
    return kernels.prefix_sums(chains.parent, chains.last, np.maximum(alone, 0.0))[:, 0], speed


def _allowed(chains: Antichains, pinned: Mapping[str, int], moves: Moves, machine: Machine, several: bool) -> Bools:
    """Return where a chain may be cut: the full state only at the end, and every pinned block on its own side.

    A stage with `several` devices may have blocks pinned to all of them.
    """
    allowed = np.ones((len(moves.used), len(chains)), np.bool_)
    last = max(moves.moves, key=lambda m: m.target).target
    if len(moves.final) == 1:
        allowed[last, :-1] = False
    if not pinned:
        return allowed
    devices_of: dict[int, set[int]] = {}
    for name, device in pinned.items():
        if not 0 <= device < len(machine):
            raise PlanError(f"{name!r} is pinned to stage {device}, and the plan has stages 0 to {len(machine) - 1}")
        block = chains.blocks.home[name]
        devices_of.setdefault(block, set()).add(device)
        if len(devices_of[block]) > 1 and not several:
            raise PlanError(
                f"{name!r} is pinned to stage {device}, but it must stay together with a node pinned to stage "
                f"{min(devices_of[block] - {device})} (they share memory or parameters): pin both to one stage"
            )
    for q, used in enumerate(moves.used):
        weight = np.zeros((len(chains.blocks), 2))
        for block, devices in devices_of.items():
            weight[block] = [len(devices - set(used)), len(devices & set(used))]
        inside = kernels.prefix_sums(chains.parent, chains.last, weight)
        allowed[q] &= (inside[:, 0] == 0) & (inside[:, 1] == weight[:, 1].sum())
    return allowed
