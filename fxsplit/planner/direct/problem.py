"""The search problem under direct sends: a stage pays once for each tensor that it shares with other stages.

Such a load does not separate into a term of the start and a term of the end, so this cost model has its own problem and
kernel. The rest of the planner sees a `Problem` like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf
from typing import cast

import numpy as np
from numpy.typing import NDArray

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.blocks import build_csr
from fxsplit.ir.facts.price import CostModel
from fxsplit.planner.clock import SearchClock
from fxsplit.planner.direct import kernels
from fxsplit.planner.kernels import fit, run_counted
from fxsplit.planner.kernels.lattice import live_bytes
from fxsplit.planner.kernels.tables import IDLE, Bools, Floats, Ints, Lattice, SharedTensors
from fxsplit.planner.problem.moves import Moves
from fxsplit.planner.problem.problem import Path, Problem
from fxsplit.planner.search.dense import line_of, membership

FEW = 1e4
"""If the price of all tensors is this many times a good load, sums of prices lose the digits of small tensors."""


@dataclass(frozen=True, eq=False)
class DirectProblem(Problem):
    """A problem in which a stage also pays for the tensors that it shares with other stages.

    A tensor's *pins* are the blocks that make or read it.

    - `pins_ptr`, `pins`: the tensors of each block (CSR)
    - `total`: [tensors], the number of pins
    - `size`: [tensors], bytes
    - `rate`: [kinds], ms per byte
    - `better`: bool [configurations, configurations], whether the first makes the second useless; see `_list_better`

    `start` and `end` of the tables hold the time of the nodes only.
    """

    chains: Antichains
    pins_ptr: Ints
    pins: Ints
    total: Ints
    size: Floats
    rate: Floats
    better: Bools

    def shared(self, states: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return the bytes that each stage between two of `states` shares with others; see Problem."""
        return self._shared(states), self.rate

    def device_loads(self, path: Path) -> list[float]:
        """Return the busy time of the devices of every stage in a chain, in ms."""
        states = np.array([0, *(state for state, _ in path)], np.int64)
        shared = self._shared_by_counts(membership(self.chains, states))
        rates = [self.rate[self.kind[self.moves.number[move]]] for _, move in path]
        paid = zip(super().device_loads(path), rates, strict=True)
        return [load + float(rate * shared[i, i + 1]) for i, (load, rate) in enumerate(paid)]

    def test(self, threshold: float, clock: SearchClock | None = None) -> Path | None:
        """Return a chain in which every stage has load <= threshold (ms) and fits, or None. Raises OutOfTime."""
        path = self._test(threshold, clock or SearchClock(), closing=True)
        # Closures ignore memory and launches, so this chain may be invalid. A test without closures is slower.
        if path is not None and (not self._fits(path) or max(self.launches(path)) > threshold):
            path = self._test(threshold, clock or SearchClock(), closing=False)
        return path

    def _test(self, threshold: float, clock: SearchClock, *, closing: bool) -> Path | None:
        """Return a chain under `threshold`, or None. `closing` permits closures, which kernels.py defines."""
        return self.trace(*clock.run(lambda steps: self.reach(threshold, steps, closing=closing)))

    def reach(self, threshold: float, steps: int, *, closing: bool = True) -> tuple[Ints, Ints, int]:
        """Run the kernel for at most `steps` steps; return the two tables that `trace` reads, and the steps it took."""
        tables = self._lattice, self.tables, self._tensors
        return run_counted(kernels.reach, len(self), steps, *tables, closing, threshold)

    def under(self, upper: float) -> DirectProblem:
        """Return the problem with large tensors made smaller, so that sums do not lose the digits of small tensors.

        upper: a time in ms that the search has to beat. A tensor whose transfer takes longer only has to stay too slow:
            it gets a size that still takes longer than `upper` on every link.
        """
        # On the cheapest link too, the tensor must cost more than the bound.
        rate = float(self.rate[self.rate > 0].min(initial=inf))
        if not 0 < upper * FEW < float(self.size.sum()) * rate < inf:
            return self
        return replace(self, size=np.minimum(self.size, 4.0 * upper / rate))

    def for_excess(self) -> Problem:
        """Return the problem in which a stage's load is the bytes by which it exceeds its memory; tensors are free."""
        # Without prices of tensors the loads separate, so a plain Problem does.
        relaxed = super().for_excess()
        return Problem(**{f.name: getattr(relaxed, f.name) for f in fields(Problem)})

    def restricted(self, order: Sequence[int]) -> DirectProblem:
        """Return the problem restricted to the states in `order`, the prefixes of a topological order."""
        return replace(cast(DirectProblem, super().restricted(order)), chains=line_of(self.chains, order))

    def _fits(self, path: Path) -> bool:
        """Return whether every stage of a chain fits in memory."""
        t, begin = self.tables, 0
        for end, move in path:
            k = self.kind[self.moves.number[move]]
            if t.space_low[k, end] - t.space_low[k, begin] > t.capacity[k]:
                return False
            begin = end
        return True

    def _shared(self, states: NDArray[np.int64]) -> Floats:
        """Return the bytes of tensors that stage J..I shares with other stages, for every pair of `states`: [J, I].

        A tensor is shared if I - J contains some of its pins, but not all. It is not shared if I and J contain equally
        many of its pins, or if J contains none and I all.
        """
        if not self.total.size:
            return np.zeros((states.size, states.size))
        inside = membership(self.chains, states)
        # A line of states has a faster method, and most searches begin with a line.
        if np.all(inside[1:] >= inside[:-1]):
            return self._shared_in_line(inside)
        return self._shared_by_counts(inside)

    def _shared_by_counts(self, inside: NDArray[np.float32]) -> Floats:
        """Like `_shared`, from the number of each tensor's pins in each state."""
        makes = np.zeros((len(self.chains.blocks), self.total.size), np.float32)
        makes[np.repeat(np.arange(len(self.chains.blocks)), np.diff(self.pins_ptr)), self.pins] = 1.0
        count = inside @ makes
        shared = np.zeros((len(inside), len(inside)))
        # Sum the paid bytes tensor by tensor: a difference of large sums would lose the digits of small tensors.
        for number in range(int(self.total.max(initial=0))):
            some = self.total > number
            here, more = count[:, some] == number, count[:, some] > number
            if number == 0:
                more &= count[:, some] < self.total[some]  # a stage with all pins of a tensor pays nothing
            shared += (here * self.size[some]) @ more.T.astype(np.float64)
        return shared

    def _shared_in_line(self, inside: NDArray[np.float32]) -> Floats:
        """Like `_shared`, for nested states; `inside` are their blocks.

        The pairs (J, I) that do not pay for a tensor form a few rectangles: J and I both lie between two consecutive
        pins, or J lies before the first pin and I after the last:

            J:      0 1 2 3
            I = 3   - # # -      a tensor with pins that enter at states 1 and 3 of a line:
            I = 2   # - -        # pays for it, - does not
            I = 1   # -
            I = 0   -

        Add each rectangle at its corners; two cumulative sums fill it, in time proportional to the pins instead of the
        pairs.
        """
        n = inside.shape[0]
        # The first state of the line that contains each pin.
        enters = inside.argmax(axis=0)[np.repeat(np.arange(inside.shape[1]), np.diff(self.pins_ptr))]
        order = np.lexsort((enters, self.pins))
        tensor, at = self.pins[order], enters[order]
        size = self.size[tensor]
        first, last = np.r_[True, tensor[1:] != tensor[:-1]], np.r_[tensor[1:] != tensor[:-1], True]
        after = np.where(last, n, np.r_[at[1:], n])  # state of the tensor's next pin
        corners = np.zeros((n + 1, n + 1))
        np.add.at(corners, (at, np.zeros_like(at)), size)
        np.add.at(corners, (at, after), -size)
        np.add.at(corners, (np.zeros_like(at[first]), at[first]), -size[first])
        corners[0, 0] += size[first].sum()
        np.add.at(corners, (np.zeros_like(at[first]), at[last]), size[first])
        np.add.at(corners, (at[first], at[last]), -size[first])
        unpaid = corners.cumsum(axis=0).cumsum(axis=1)[:n, :n]
        paid: Floats = np.maximum(float(self.size.sum()) - unpaid, 0.0)
        return paid

    @cached_property
    def live(self) -> Floats:
        """The bytes of tensors with pins on both sides of each state: float64 [states]."""
        # No pin is inside from the start: under direct sends the caller is no pin.
        none = np.zeros(self.total.size, np.int32)
        lists = (self.pins_ptr, self.pins, none, self.total, self.size[:, None])
        live = fit(live_bytes, len(self.chains))(self.chains.parent, self.chains.last, *lists)
        return np.ascontiguousarray(live[:, 0])

    @cached_property
    def _lattice(self) -> Lattice:
        """The ideals and the edges between them, for the kernel."""
        c = self.chains
        return Lattice(c.parent, c.last, c.pointer, c.node, c.child)

    @cached_property
    def _tensors(self) -> SharedTensors:
        """The shared tensors, for the kernel."""
        busy = self.tables.end + self.rate[:, None] * self.live
        least = fit(kernels.cheapest_above, len(self))(self.chains.pointer, self.chains.child, busy)
        return SharedTensors(self.pins_ptr, self.pins, self.total, self.size, self.rate, self.live, least, self.better)


def _list_better(moves: Moves, *, interchangeable: bool) -> Bools:
    """Return [a, b], whether configuration a makes b useless: a uses only some of b's devices, and no others.

    A chain that came as far with a has more devices left. This requires that a plan may end with any number of stages,
    and that the devices left by a are no worse.
    """
    holds = interchangeable and len(moves.final) > 1 and not moves.n_stages
    used = [set(u) for u in moves.used]
    return np.array([[holds and a < b for b in used] for a in used], np.bool_)


def pose_direct(
    problem: Problem, costs: Costs, chains: Antichains, machine: Machine, model: CostModel, *, interchangeable: bool
) -> DirectProblem:
    """Return a compute-only problem with the price of the tensors that stages share added.

    `interchangeable`: a plan stays equally good if its stages swap devices.
    """
    pins: list[list[int]] = [[] for _ in chains.blocks.members]
    total: list[int] = []
    size: list[float] = []
    for bytes_, names in costs.tensors if model.traffic else ():
        met = sorted({chains.blocks.home[name] for name in names})
        # A tensor inside one block never crosses a cut.
        if len(met) > 1 and bytes_ > 0:
            for block in met:
                pins[block].append(len(size))
            total.append(len(met))
            size.append(bytes_)
    rate = np.zeros(problem.tables.capacity.size)
    for move, kind in zip(problem.moves.moves, problem.kind, strict=True):
        if kind != IDLE:
            rate[kind] = 1.0 / machine.bytes_per_ms(move.devices[0], move.devices[0])
    pointer, flat = build_csr(pins)
    return DirectProblem(
        **{f.name: getattr(problem, f.name) for f in fields(Problem)},
        chains=chains,
        pins_ptr=pointer,
        pins=flat,
        total=np.array(total, np.int32),
        size=np.array(size, np.float64),
        rate=rate,
        better=_list_better(problem.moves, interchangeable=interchangeable),
    )
