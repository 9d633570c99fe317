"""Exact referee of schedules: the shortest step of a small pipeline, from the definition and without the search's code.

A device runs one action at a time. Microbatches keep their order in each stage and kind, since they are all alike, so
the orders of the devices decide everything: a link's messages leave in the order in which one device makes them.

- `try_all_orders` runs every order of every device. Up to about 10^5 of them are quick.
- `find_optimum` adds one action after another, in order of their begins. It drops a partial schedule if another one has
  done the same actions and is nowhere later, or if it cannot end before a known step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from random import Random

import numpy as np
from numpy.typing import NDArray

from fxsplit.schedule.kernels.instance import Instance, make_instance
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.simulation.simulate import Times

F, I, W = 0, 1, 2  # noqa: E741
OPS = {"F": F, "I": I, "W": W}
NEVER = float("inf")
CLOSE = 1e-7
"""Steps that differ by this share are the same."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Order = tuple[tuple[int, int], ...]
"""The order of a device: pairs (operation, stage)."""


class TooManyError(Exception):
    """Too many partial schedules to keep."""


@dataclass(frozen=True)
class Pipeline:
    """A small pipeline: lists have one entry for each stage, `memory` one for each device.

    - `devices`: the device of each stage; `placement` says how they are dealt: line, v or loop
    - `n`: the number of microbatches
    - `times`: of F, I and W, which are a forward, an input gradient and a weight gradient
    - `hops`: of values and gradients, the time on the link before the stage; `latency` comes after it
    - `held`: the memory of a microbatch in a stage, from its F on; `kept` is the share that only its W frees
    """

    devices: tuple[int, ...]
    n: int
    times: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    hops: tuple[tuple[float, ...], tuple[float, ...]]
    latency: tuple[float, ...]
    held: tuple[float, ...]
    kept: tuple[float, ...]
    memory: tuple[float, ...]
    placement: str

    @property
    def p(self) -> int:
        return 1 + max(self.devices)

    @property
    def n_stages(self) -> int:
        return len(self.devices)

    def state_times(self) -> Times:
        backward = [i + w for i, w in zip(self.times[I], self.times[W], strict=True)]
        return Times(self.times[F], backward, *self.hops, weight_ms=self.times[W], latency_ms=self.latency)

    def list_own(self, device: int) -> list[int]:
        return [s for s, d in enumerate(self.devices) if d == device]

    def find_next(self, op: int, stage: int) -> tuple[int, int, int | None] | None:
        """Return the action after an F or I on the way of a microbatch, and the boundary between devices or None."""
        if op == F and stage == self.n_stages - 1:
            return I, stage, None
        other = stage + 1 if op == F else stage - 1
        if op == W or other < 0:
            return None
        return op, other, max(stage, other) if self.devices[stage] != self.devices[other] else None

    def change_memory(self, op: int, stage: int) -> float:
        """Return the memory that an action takes when it begins, or frees (below 0) when it ends."""
        held, late = self.held[stage], self.held[stage] * self.kept[stage]
        return {F: held, I: late - held, W: -late}[op]

    @cached_property
    def tails(self) -> Floats:
        """[operations, stages, microbatches]: the least time from the begin of an action to the end of the step."""
        found = np.zeros((3, self.n_stages, self.n))
        for op in (W, I, F):
            # The last on the way of a microbatch first.
            for s in sorted(range(self.n_stages), reverse=op == F):
                for m in reversed(range(self.n)):
                    after = found[op, s, m + 1] if m + 1 < self.n else 0.0
                    if op == I:
                        after = max(after, found[W, s, m])
                    then = self.find_next(op, s)
                    if then is not None:
                        way = 0.0 if then[2] is None else self.hops[op][then[2]] + self.latency[then[2]]
                        after = max(after, way + found[then[0], then[1], m])
                    found[op, s, m] = self.times[op][s] + after
        return found


def list_orders(x: Pipeline, device: int) -> Iterator[Order]:
    """Yield every order of a device that its own stages and its memory allow."""
    own = x.list_own(device)

    def go_on(done: dict[tuple[int, int], int], used: float, order: Order) -> Iterator[Order]:
        if len(order) == 3 * len(own) * x.n:
            yield order
        for op, s in product((F, I, W), own):
            more = x.change_memory(op, s)
            if done[op, s] == x.n or (op and done[op, s] == done[op - 1, s]):
                continue
            if more <= 0 or used + more <= x.memory[device] + 1e-9:
                yield from go_on({**done, (op, s): done[op, s] + 1}, used + more, (*order, (op, s)))

    return go_on(dict.fromkeys(product((F, I, W), own), 0), 0.0, ())


def run_orders(x: Pipeline, orders: Sequence[Order]) -> float:
    """Return the step of an order for each device, or NEVER if the devices wait for each other."""
    arrived: dict[tuple[int, int, int], float] = {(F, 0, m): 0.0 for m in range(x.n)}
    free, at, links = [0.0] * x.p, [0] * x.p, dict[tuple[int, int], float]()
    done = dict.fromkeys(product((F, I, W), range(x.n_stages)), 0)
    moved = True
    while moved:
        moved = False
        for d, order in enumerate(orders):
            while at[d] < len(order):
                op, s = order[at[d]]
                m = done[op, s]
                # A device does the F of a microbatch before its I, and the I before its W.
                if (op < W and (op, s, m) not in arrived) or (op and done[op - 1, s] <= m):
                    break
                free[d] = max(free[d], arrived.get((op, s, m), 0.0)) + x.times[op][s]
                then = x.find_next(op, s)
                if then is not None:
                    end, boundary = free[d], then[2]
                    if boundary is not None:
                        link = d, x.devices[then[1]]
                        links[link] = max(links.get(link, 0.0), end) + x.hops[op][boundary]
                        end = links[link] + x.latency[boundary]
                    arrived[then[0], then[1], m] = end
                done[op, s], at[d], moved = m + 1, at[d] + 1, True
    return NEVER if any(a < len(order) for a, order in zip(at, orders, strict=True)) else max(free)


def try_all_orders(x: Pipeline) -> float:
    """Return the shortest step of all orders of all devices."""
    return min(run_orders(x, orders) for orders in product(*(list(list_orders(x, d)) for d in range(x.p))))


class _Partial:
    """Partial schedules, one a row: how many of each action are done, and the times that decide what is possible.

    - `done`: [rows, operations x stages]
    - `path`: [rows, actions], operation x stages + stage of each action added so far
    - `now`: [rows, devices + links + 2 x stages x microbatches]: when a device is free, when a link is free, and when
      the input of an F or I arrives (0 if it is used or not yet made). Nothing begins before the last action began, so
      no time is below that.
    """

    def __init__(self, done: Ints, now: Floats, path: Ints):
        self.done, self.now, self.path = done, now, path

    def keep(self, rows: NDArray[np.bool_] | Ints) -> _Partial:
        return _Partial(self.done[rows], self.now[rows], self.path[rows])

    @classmethod
    def join(cls, parts: list[_Partial]) -> _Partial:
        return cls(
            np.concatenate([part.done for part in parts]),
            np.concatenate([part.now for part in parts]),
            np.concatenate([part.path for part in parts]),
        )


class _Referee:
    """Searches orders of a pipeline with a step below `below`, and keeps at most `most` partial schedules at once."""

    def __init__(self, x: Pipeline, below: float, most: int):
        self.x, self.below, self.most = x, below * (1 - CLOSE), most
        links = sorted({(x.devices[s], x.devices[s + d]) for s in range(x.n_stages) for d in (-1, 1)
                        if 0 <= s + d < x.n_stages and x.devices[s] != x.devices[s + d]})  # fmt: skip
        self.links = {link: x.p + i for i, link in enumerate(links)}
        self.first = x.p + len(links)
        self.width = self.first + 2 * x.n_stages * x.n
        self.work: list[dict[int, float]] = [{} for _ in range(x.p)]
        self.radix = (x.n + 1) ** np.arange(3 * x.n_stages)

    def column(self, op: int, s: int) -> int:
        """Return the column of `now` in which the inputs of an F or I in a stage begin, one for each microbatch."""
        return self.first + (op * self.x.n_stages + s) * self.x.n

    def find(self) -> tuple[Order, ...] | None:
        """Return orders with the shortest step, or None if none is shorter than the known one."""
        x = self.x
        none = np.zeros((1, 3 * x.n_stages), np.int64)
        rows = _Partial(none, np.zeros((1, self.width)), none[:, :0])
        for _ in range(3 * x.n_stages * x.n):
            grown = [self.add(rows, op, s) for op in (F, I, W) for s in range(x.n_stages)]
            # All kinds together, since a call of numpy takes as long as the work on a hundred rows.
            rows = _Partial.join(grown)
            self.clamp(rows)
            rows = self.drop_dominated(rows.keep(self.bound(rows) < self.below))
            if len(rows.done) > self.most:
                raise TooManyError(f"{len(rows.done)} partial schedules of {x}")
            if not len(rows.done):
                return None
        best = int(rows.now[:, : x.p].max(axis=1).argmin())
        pairs = [divmod(at, x.n_stages) for at in rows.path[best].tolist()]
        return tuple(tuple((op, s) for op, s in pairs if x.devices[s] == d) for d in range(x.p))

    def find_ready(self, rows: _Partial, op: int, s: int) -> Floats:
        """Return when the input of the next F or I arrives; NEVER if it is not made."""
        x, index = self.x, np.arange(len(rows.done))
        m = np.minimum(rows.done[:, op * x.n_stages + s], x.n - 1)
        if op == F and s == 0:
            return np.zeros(len(index))
        made = rows.done[:, op * x.n_stages + (s - 1 if op == F else s + 1)] if op == F or s + 1 < x.n_stages else (
            rows.done[:, F * x.n_stages + s])  # fmt: skip
        ready: Floats = np.where(made > m, rows.now[index, self.column(op, s) + m], NEVER)
        return ready

    def find_used(self, rows: _Partial, device: int) -> Floats:
        """Return the memory that a device holds."""
        x, used = self.x, np.zeros(len(rows.done))
        for s in x.list_own(device):
            for op in (F, I, W):
                used = used + rows.done[:, op * x.n_stages + s] * x.change_memory(op, s)
        return used

    def add(self, rows: _Partial, op: int, s: int) -> _Partial:
        """Return the partial schedules with one more action of a kind and stage, where that is possible."""
        x, d, at = self.x, self.x.devices[s], op * self.x.n_stages + s
        can = rows.done[:, at] < x.n
        if op:
            can &= rows.done[:, at] < rows.done[:, at - x.n_stages]
        if op == F:
            can &= self.find_used(rows, d) + x.held[s] <= x.memory[d] + 1e-9
        rows = rows.keep(can)
        begin = rows.now[:, d].copy()
        if op < W:
            ready = self.find_ready(rows, op, s)
            begin = np.maximum(begin, ready)
            can = np.isfinite(begin)
            # A W that fits before it could go there: nothing would be later.
            for other in x.list_own(d):
                waits = rows.done[:, I * x.n_stages + other] > rows.done[:, W * x.n_stages + other]
                can &= ~(waits & (rows.now[:, d] + x.times[W][other] <= begin))
            rows, begin = rows.keep(can), begin[can]
        end = begin + x.times[op][s]
        index, m = np.arange(len(end)), rows.done[:, at].copy()
        done, now = rows.done.copy(), rows.now.copy()
        done[:, at] += 1
        now[:, d] = end
        if op < W:
            now[index, self.column(op, s) + m] = 0.0
        then = x.find_next(op, s)
        if then is not None:
            arrival, boundary = end, then[2]
            if boundary is not None:
                link = self.links[d, x.devices[then[1]]]
                now[:, link] = np.maximum(now[:, link], end) + x.hops[op][boundary]
                arrival = now[:, link] + x.latency[boundary]
            now[index, self.column(then[0], then[1]) + m] = arrival
        now[:, : self.first] = np.maximum(now[:, : self.first], begin[:, None])
        return _Partial(done, now, np.column_stack([rows.path, np.full(len(end), at)]))

    def clamp(self, rows: _Partial) -> None:
        """Raise times to the earliest that can matter: an input waits for its device, a link for the device's work."""
        x = self.x
        for (source, _), link in self.links.items():
            rows.now[:, link] = np.maximum(rows.now[:, link], rows.now[:, source])
        for op, s in product((F, I), range(x.n_stages)):
            part = rows.now[:, self.column(op, s) : self.column(op, s) + x.n]
            free = rows.now[:, x.devices[s], None]
            part[:] = np.where(part > 0, np.maximum(part, free), 0.0)

    def bound(self, rows: _Partial) -> Floats:
        """Return a step that no continuation of a partial schedule ends before."""
        x = self.x
        low = np.zeros(len(rows.done))
        for d in range(x.p):
            low = np.maximum(low, rows.now[:, d] + self.find_work(rows, d))
        head = np.zeros((3, x.n_stages, x.n, len(low)))
        for op in (F, I, W):
            for s in sorted(range(x.n_stages), reverse=op == I):
                free, done = rows.now[:, x.devices[s]], rows.done[:, op * x.n_stages + s]
                before = free
                for m in range(x.n):
                    ready = before
                    if op == W:
                        ready = np.maximum(ready, head[I, s, m])
                    elif op == I and s == x.n_stages - 1:
                        ready = np.maximum(ready, head[F, s, m])
                    elif op == I or s:
                        ready = np.maximum(ready, self.find_arrival(rows, head, op, s, m))
                    if op == I:
                        ready = np.maximum(ready, head[F, s, m])
                    left = done <= m
                    low = np.where(left, np.maximum(low, ready + x.tails[op, s, m]), low)
                    # From here on `head` holds when an operation ends, or 0 if it is done.
                    before = np.where(left, ready + x.times[op][s], before)
                    head[op, s, m] = np.where(left, before, 0.0)
        return low

    def find_arrival(self, rows: _Partial, head: Floats, op: int, s: int, m: int) -> Floats:
        """Return when the input of an F or I arrives; if it is not made yet, the earliest time at which it may."""
        x = self.x
        source = s - 1 if op == F else s + 1
        way = 0.0
        if x.devices[source] != x.devices[s]:
            boundary = max(source, s)
            way = x.hops[op][boundary] + x.latency[boundary]
        made = rows.done[:, op * x.n_stages + source] > m
        found: Floats = np.where(made, rows.now[:, self.column(op, s) + m], head[op, source, m] + way)
        return found

    def find_work(self, rows: _Partial, device: int) -> Floats:
        """Return the least time from when a device is free to the end of the step, by what is left for it to do."""
        x, known = self.x, self.work[device]
        columns = [op * x.n_stages + s for op in (F, I, W) for s in x.list_own(device)]
        packed = rows.done[:, columns] @ self.radix[: len(columns)]
        keys, firsts, back = np.unique(packed, return_index=True, return_inverse=True)
        for i, key in enumerate(keys.tolist()):
            if key in known:
                continue
            left = []
            for op, s in product((F, I, W), x.list_own(device)):
                for m in range(int(rows.done[firsts[i], op * x.n_stages + s]), x.n):
                    left.append((x.tails[op, s, m] - x.times[op][s], x.times[op][s]))
            best = total = 0.0
            # The longest tail first is best for one device that need not wait.
            for tail, each in sorted(left, reverse=True):
                total += each
                best = max(best, total + tail)
            known[key] = best
        return np.array([known[key] for key in keys.tolist()])[back]

    def drop_dominated(self, rows: _Partial) -> _Partial:
        """Drop each partial schedule that is nowhere earlier than another one with the same actions done."""
        keys = rows.done @ self.radix
        order = np.lexsort((rows.now.sum(axis=1), keys))
        rows, keys = rows.keep(order), keys[order]
        for turn in range(64):
            starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])) if len(keys) else keys
            sizes = np.diff(np.append(starts, len(keys)))
            if not (sizes > turn + 1).any():
                break
            refs = np.repeat(starts + np.minimum(turn, sizes - 1), sizes)
            place = np.arange(len(keys)) - np.repeat(starts, sizes)
            at = np.flatnonzero(place > turn)
            worse = (rows.now[refs[at]] <= rows.now[at] + 1e-9).all(axis=1)
            alive = np.ones(len(keys), np.bool_)
            alive[at[worse]] = False
            rows, keys = rows.keep(alive), keys[alive]
        return rows


def find_optimum(x: Pipeline, known: float, most: int = 100_000) -> float:
    """Return the shortest step, given the step of a schedule that exists.

    Raises TooManyError if more than `most` partial schedules must be kept.
    """
    orders = _Referee(x, known, most).find()
    if orders is None:
        return known
    step = run_orders(x, orders)
    assert step < known, "the branch and bound and the run of its orders disagree"
    return step


def find_peaks(x: Pipeline, schedule: Schedule) -> list[float]:
    """Return the most memory that each device holds at once, in microbatches of its stages."""
    peaks = []
    for row in schedule.actions:
        used = peak = 0.0
        for action in row:
            if action.op == "B":
                used += x.change_memory(I, action.stage) + x.change_memory(W, action.stage)
            else:
                used += x.change_memory(OPS[action.op], action.stage)
            peak = max(peak, used)
        peaks.append(peak)
    return peaks


def read_orders(schedule: Schedule) -> list[Order]:
    """Return the orders of a schedule whose backwards are all split."""
    return [tuple((OPS[action.op], action.stage) for action in row) for row in schedule.actions]


def make_arrays(x: Pipeline) -> Instance:
    """Return a pipeline as the instance that kernels read."""
    homes = tuple((d,) for d in x.devices)
    return make_instance(homes, x.n, x.state_times(), x.memory, x.kept, x.held)


def draw(random: Random, placement: str, most_microbatches: int = 5) -> Pipeline:
    """Draw a pipeline: `placement` is line, v or loop."""
    p, v = random.randint(2, 3), 1 if placement == "line" else 2
    n = random.randint(2, min(most_microbatches, 5 if v == 1 else 4 if p == 2 else 3))
    count = v * p
    devices = [s if s < p else s - p if placement == "loop" else 2 * p - 1 - s for s in range(count)]
    forward = [float(random.randint(20, 60)) for _ in range(count)]
    times = (
        tuple(forward),
        tuple(float(max(1, int(f * random.uniform(0.6, 1.5)))) for f in forward),
        tuple(float(max(1, int(f * random.uniform(0.3, 1.0)))) for f in forward),
    )
    most = 24 if random.random() < 0.7 else 0
    hops = tuple(tuple(float(random.randint(0, most)) for _ in range(count)) for _ in range(2))
    # Stages on one device hand over without a message.
    late = random.random() < 0.4
    latency = tuple(float(random.randint(0, 40)) if late else 0.0 for _ in range(count))
    share = random.choice([1.0, 0.8, 0.5, 0.2])
    kept = tuple(share if random.random() < 0.7 else random.choice([1.0, 0.5, 0.2]) for _ in range(count))
    if random.random() < 0.6:
        kept = (share,) * count
    held = [1.0 / v] * count
    if v == 2 and random.random() < 0.4:
        for d in range(p):
            own = [s for s in range(count) if devices[s] == d]
            held[own[0]] = random.choice([0.25, 0.4, 0.6])
            held[own[1]] = 1 - held[own[0]]
    limits = random.random()
    if limits < 0.4:
        memory = [float(min(n, p - d)) if v == 1 else float(p) for d in range(p)]
    elif limits < 0.8:
        memory = [1 + random.randint(0, 2 * p) / 2 for _ in range(p)]
    else:
        memory = [NEVER] * p
    return Pipeline(tuple(devices), n, times, (hops[0], hops[1]), latency, tuple(held), kept, tuple(memory), placement)
