"""The search problem: states, moves, and the cost of each kind of move, as arrays.

A *state* is an ideal of the graph (see lattice.py) with sums over its nodes. The search knows it by its number. A stage
is the difference of two states J < I, on the devices of a *move* (see moves.py). Many moves cost the same: moves over
equal devices, links and memory form one *kind*, which is priced once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from fxsplit.errors import PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.facts.price import CostModel
from fxsplit.planner.clock import SearchClock
from fxsplit.planner.kernels import run_counted
from fxsplit.planner.kernels.separable import reach, reach_bounded
from fxsplit.planner.kernels.tables import IDLE, NO_BANS, NO_NEEDS, Bools, Floats, Ints, Tables
from fxsplit.planner.lattice.lattice import count_live_messages
from fxsplit.planner.problem.allowed import list_allowed
from fxsplit.planner.problem.fitting import RefusedStages, Scale
from fxsplit.planner.problem.moves import Move, Moves, powers
from fxsplit.planner.problem.prices import MoveKind, measure_work_with_hosts, price_launches, price_times, tabulate
from fxsplit.planner.problem.space import Space, carry_along_line, list_pairs, price_space

PairCosts = Callable[[int, NDArray[np.int64], NDArray[np.int64]], tuple[Floats, Bools]]
SLACK = 1e-9
"""Sums of memory may be wrong by this relative amount."""

Path = list[tuple[int, Move]]
"""A chain of states: for each stage, the state at its end and its move."""


@dataclass(frozen=True, eq=False)
class Problem:
    """The problem: find a chain of states in which every stage has a small load and fits in memory.

    - `kind[m]` is the kind of move m, or IDLE if it has no devices
    - `tables` are the costs of each kind from and to each state (see kernels/tables.py)
    - `rates` (float64 [kinds, 3]): the most work done in one ms, and the fewest ms to receive and to send a byte
    - `capacity` (float64 [kinds]) is the memory of a stage's devices in bytes
    - `scale` weighs stages to the byte if the tables are only a lower bound of their memory, else None
    - `refused` are the stages that `scale` has found too large
    - `numbers` are the states' numbers on the scale, or None if they are equal

    A subclass may add to the loads. It overrides `test`, `device_loads`, `shared`, `live`, `under`, and the methods
    that derive problems.
    """

    states: States
    moves: Moves
    kind: tuple[int, ...]
    tables: Tables
    rates: Floats
    capacity: Floats
    scale: Scale | None
    numbers: NDArray[np.int64] | None
    refused: RefusedStages

    def __len__(self) -> int:
        return int(self.tables.work.size)

    def test(self, threshold: float, clock: SearchClock | None = None) -> Path | None:
        """Return a chain in which every stage fits and has load <= threshold (ms), or None. Raises OutOfTime."""
        clock = clock or SearchClock()
        while True:
            path = self.trace(*clock.run(lambda steps: self.reach(threshold, steps)))
            if path is None or self.fits(path):
                return path

    def fits(self, path: Path) -> bool:
        """Return whether every stage of a chain fits to the byte. Stages that do not fit are refused from now on."""
        fits = True
        for kind, begin, end, excess in self.list_excess(path):
            # A device has no byte to spare.
            if excess > 0.0:
                self.refused.add(kind, begin, end)
                fits = False
        return fits

    def list_excess(self, path: Path) -> list[tuple[int, int, int, float]]:
        """Return (kind, start, end, excess bytes) of each stage whose memory the tables only bound."""
        found, begin = [], 0
        for end, move in path:
            kind = self.kind[self.moves.number[move]]
            if self.scale is not None and np.isfinite(self.capacity[kind]):
                a, b = (begin, end) if self.numbers is None else (int(self.numbers[begin]), int(self.numbers[end]))
                found.append((kind, begin, end, self.scale.weigh(kind, a, b) - float(self.capacity[kind])))
            begin = end
        return found

    def list_tables(self, states: NDArray[np.int64] | None = None) -> Tables:
        """Return the tables, with the refused stages as bans, for all states or a subset."""
        n_kinds = self.capacity.size
        if states is None:
            return self.tables._replace(bans=self.refused.list_bans(n_kinds, len(self)))
        return self.tables.take(states)._replace(bans=self.refused.list_among(n_kinds, states))

    def reach(self, threshold: float, steps: int) -> tuple[Ints, Ints, int]:
        """Run the kernel for at most `steps` steps; return the two tables that `trace` reads, and the steps it took."""
        # Lists of starts are slower than a single start: use them only if memory or launches matter.
        t, bounded = self.list_tables(), bool(np.isfinite(self.tables.capacity).any())
        if t.launch.size and not bounded:
            # Without memory limits, let only the launches distinguish starts.
            t = t._replace(space_start=t.launch, space_end=t.launch, space_low=t.launch)
        return run_counted(reach_bounded if bounded or t.launch.size else reach, len(self), steps, t, threshold)

    def trace(self, origin: Ints, via: Ints) -> Path | None:
        """Follow two tables [configurations, states] back from the full state; return the chain or None."""
        full = len(self) - 1
        # All final configurations are equally good under a threshold. Take the first, so that plans are deterministic.
        at = next((q for q in sorted(self.moves.final) if origin[q, full] >= 0), None)
        if at is None:
            return None
        path: Path = []
        state = full
        while at != 0:
            move = self.moves.moves[via[at, state]]
            if move.devices:  # an idle device has no stage
                path.append((state, move))
            state, at = int(origin[at, state]), move.source
        return path[::-1]

    def loads(self, path: Path) -> list[float]:
        """Return the load of every stage in a chain, in ms: the longer of device time and launch time."""
        return [max(pair) for pair in zip(self.device_loads(path), self.launches(path), strict=True)]

    def launches(self, path: Path) -> list[float]:
        """Return the launch time of the hosts of every stage in a chain, in ms."""
        launch, begin = self.tables.launch, 0
        if not launch.size:
            return [0.0] * len(path)
        found = []
        for end, move in path:
            k = self.kind[self.moves.number[move]]
            found.append(float(launch[k, end] - launch[k, begin]))
            begin = end
        return found

    def device_loads(self, path: Path) -> list[float]:
        """Return the busy time of the devices of every stage in a chain, in ms."""
        t, found, begin = self.tables, [], 0
        for end, move in path:
            k = self.kind[self.moves.number[move]]
            load = t.end[k, end] - t.start[k, begin]
            found.append(float(max(load, t.start_floor[k, begin], t.end_floor[k, end])))
            begin = end
        return found

    def pair_costs(self, states: NDArray[np.int64]) -> PairCosts:
        """Return a function (kind, starts, ends) -> (loads in ms, whether they fit in memory), both [starts, ends].

        Starts and ends are places in `states`. A result has a meaning only if the start's ideal lies inside the end's.
        """
        t = self.tables
        shared, rate = self.shared(states)
        needs = self.needs(states)

        def costs(kind: int, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[Floats, Bools]:
            a, b = states[starts], states[ends]
            load = t.end[kind][None, b] - t.start[kind][a, None]
            load = np.maximum(np.maximum(load, t.start_floor[kind][a, None]), t.end_floor[kind][None, b])
            if shared.size:
                load = load + rate[kind] * shared[np.ix_(starts, ends)]
            if t.launch.size:
                load = np.maximum(load, t.launch[kind][None, b] - t.launch[kind][a, None])
            space = t.space_end[kind][None, b] - t.space_start[kind][a, None]
            if needs.size:
                space = space + needs[np.ix_(starts, ends)]
            fits = space <= t.capacity[kind]
            refused = self.refused.mark(kind, states)
            return load, fits if refused is None else fits & ~refused[np.ix_(starts, ends)]

        return costs

    def shared(self, states: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return additional bytes [J, I] paid by the stage between two `states`, and ms per byte by kind.

        In this class the first array is empty: no stage pays for more.
        """
        return np.zeros((0, 0)), np.zeros_like(self.tables.capacity)

    def needs(self, states: NDArray[np.int64]) -> Floats:
        """Return additional bytes [J, I] of memory of the stage between each pair of `states`; empty for none.

        `states` are all states, or a line of states that grow by one block each.
        """
        t = self.tables
        if not (t.needs.freed.size and np.isfinite(t.capacity).any()):
            return np.zeros((0, 0))
        if states.size == len(self):
            return self._all_needs
        line = carry_along_line(t.needs, t.in_ptr, t.in_from, states)
        return list_pairs(line, *_list_line_edges(states.size))

    @cached_property
    def _all_needs(self) -> Floats:
        """Additional bytes of memory of the stage between any two states."""
        return list_pairs(self.tables.needs, self.tables.in_ptr, self.tables.in_from)

    @cached_property
    def live(self) -> Floats:
        """The bytes of values and gradients sent across each state: float64 [states]."""
        return self.states.column("sent_bytes")

    def lower_bound(self) -> float:
        """Return a load in ms that no chain's slowest stage beats.

        It is the total work divided by the speed of all devices, or the largest block on the fastest stage; likewise
        for launches.
        """
        done, stages = self.tables.done, [m for m in self.moves.moves if m.devices]
        quickest = max(done[m.target] - done[m.source] for m in stages)
        bound = self._share(self.tables.work, float(done.max()), float(quickest))
        # A host device launches nothing, so a machine with hosts has no bound by launches.
        if self.tables.launch.size and not np.isinf(self.rates[:, 0]).any():
            launched = self.states.column("forward_launch_ms") + self.states.column("backward_launch_ms")
            everyone, most = max(map(len, self.moves.used)), max(len(m.devices) for m in stages)
            bound = max(bound, self._share(launched, everyone, most))
        return bound

    def _share(self, work: Floats, everyone: float, most: float) -> float:
        """Return a lower bound of the slowest load, in ms.

        In one ms all stages together do at most `everyone` of the `work` (float64 [states]), and one stage at most
        `most`.
        """
        if not work[-1] > 0:
            return 0.0
        # Each edge of the lattice adds one block, which some stage must run as a whole.
        ends = np.repeat(np.arange(len(self)), np.diff(self.states.in_pointer))
        largest = float((work[ends] - work[self.states.in_from]).max(initial=0.0))
        return max(float(work[-1]) / everyone, largest / most)

    def under(self, upper: float) -> Problem:
        """Return a problem with the same chains below `upper` ms. A subclass may make figures above `upper` smaller."""
        return self

    def restricted(self, order: Sequence[int]) -> Problem:
        """Return the problem restricted to the states in `order`, which must be nested."""
        at = np.array(order, np.int64)
        states = States(self.states.features[at], *_list_line_edges(at.size))
        needs, t = self.tables.needs, self.tables
        if needs.freed.size:
            needs = carry_along_line(needs, t.in_ptr, t.in_from, at)
        tables = t.take(at)._replace(in_ptr=states.in_pointer, in_from=states.in_from, needs=needs)
        numbers = at if self.numbers is None else self.numbers[at]
        return replace(self, states=states, tables=tables, numbers=numbers, refused=RefusedStages())

    def with_more_memory(self, more_bytes: float) -> Problem:
        """Return the same problem for devices with `more_bytes` more memory."""
        tables, capacity = self.tables._replace(capacity=self.tables.capacity + more_bytes), self.capacity + more_bytes
        # Stages weighed before are still known, if the states keep their numbers.
        known = [] if self.scale is None or self.numbers is not None else self.scale.list_above(capacity)
        return replace(self, tables=tables, capacity=capacity, refused=RefusedStages.of(known))

    def for_excess(self) -> Problem:
        """Return the problem in which a stage's load is the bytes by which its sums exceed its memory."""
        t, capacity = self.tables, self.capacity[:, None]
        # A device without a limit is never exceeded.
        finite = np.isfinite(capacity)
        # Transfers take no memory.
        floor = np.full_like(t.start_floor, -inf)
        tables = t._replace(
            start=np.where(finite, t.space_start, 0.0),
            end=np.where(finite, t.space_end, 0.0) - np.where(finite, capacity, 0.0),
            start_floor=floor,
            end_floor=floor,
            capacity=np.full_like(t.capacity, inf),
            launch=np.zeros((0, 0)),
            needs=NO_NEEDS,
            # Pruning by work concerns time, not memory.
            work=np.zeros_like(t.work),
            done=np.zeros_like(t.done),
            left=np.zeros_like(t.left),
        )
        return replace(self, tables=tables, capacity=tables.capacity, refused=RefusedStages())


def _list_line_edges(count: int) -> tuple[Ints, Ints]:
    """Return the edges of a line of states in CSR: each state except the first has one state just below it."""
    return np.concatenate(([0], np.arange(count))).astype(np.int32), np.arange(count - 1, dtype=np.int32)


def pose_problem(
    costs: Costs,
    states: States,
    chains: Antichains,
    machine: Machine,
    workload: Workload,
    model: CostModel,
    moves: Moves,
    pinned: Mapping[str, int],
) -> Problem:
    """Return the problem of cutting `states`, which sum up `costs`, along `moves`.

    Its loads are those of `price_split`. In the cost model `direct` they lack transfers, which `pose_direct` adds.
    """
    if costs.compress and not model.forwards:
        raise PlanError(
            f"compress={costs.compress!r} with the cost model {model.name!r}: its stages forward no values to compress"
        )
    # Number the kinds in the order of their first moves.
    numbers: dict[MoveKind, int] = {}
    of_move = [MoveKind.of(machine, workload, model, moves, move) if move.devices else None for move in moves.moves]
    kind = tuple(IDLE if k is None else numbers.setdefault(k, len(numbers)) for k in of_move)
    kinds = list(numbers)
    work, host_speed = states.column("forward_ms") + states.column("backward_ms"), 1.0
    if any(d.host for d in machine.devices):
        work, host_speed = measure_work_with_hosts(states, chains)
    done, left = powers(machine, moves, host_speed)
    # Unless stages may be empty, only the first starts at the empty state, and only the last ends at the full one.
    no_empty = not workload.may_idle
    ends_early = no_empty or (len(moves.final) > 1 and not moves.n_stages)
    figures = tabulate(kinds)
    late = bool(np.any(figures["receive_latency"]) or np.any(figures["send_latency"]))
    messages = count_live_messages(costs, chains) if late else np.zeros(len(states))
    start, end, start_floor, end_floor = price_times(
        states, messages, figures, model, starts_late=no_empty, ends_early=ends_early
    )
    capacity = np.ascontiguousarray(figures["capacity"][:, 0])
    bounded = bool(np.isfinite(capacity).any())
    space = _price_space(costs, chains, states, figures, model, start, splits=workload.splits)
    scale = Scale(costs, chains, kinds, model) if bounded and model.forwards else None
    tables = Tables(
        in_ptr=states.in_pointer,
        in_from=states.in_from,
        work=work,
        start=start,
        end=end,
        start_floor=start_floor,
        end_floor=end_floor,
        space_start=space.start,
        space_end=space.end,
        space_low=space.low,
        # Sums over the lattice lose digits: allow a tolerance, and let the scale decide.
        capacity=capacity if scale is None else capacity * (1.0 + SLACK),
        needs=space.needs,
        bans=NO_BANS,
        launch=price_launches(states, figures),
        allowed=list_allowed(chains, pinned, moves, several=model.name == "replicated"),
        moves=np.array([(m.source, m.target, k) for m, k in zip(moves.moves, kind, strict=True)], np.int32),
        done=np.array(done, np.float64),
        left=np.array(left, np.float64),
        may_idle=workload.may_idle,
    )
    rates = [(inf if k.host else k.speed, k.receive * model.forwards, k.send * model.forwards) for k in kinds]
    return Problem(states, moves, kind, tables, np.array(rates, np.float64), capacity, scale, None, RefusedStages())


def _price_space(
    costs: Costs,
    chains: Antichains,
    states: States,
    figures: Mapping[str, Floats],
    model: CostModel,
    like: Floats,
    *,
    splits: bool,
) -> Space:
    """Return the memory tables, or zeros of the shape of `like` if memory is unlimited."""
    if np.isfinite(figures["capacity"]).any():
        return price_space(costs, chains, states, figures, model, splits=splits)
    return Space(np.zeros_like(like), np.zeros_like(like), np.zeros_like(like), NO_NEEDS)
