"""Windows: prove that no schedule has a step of T ms, from the times within which each action must run.

F, I and W are the forward, the input gradient and the weight gradient of a microbatch on a stage. In a schedule with a
step of at most T, each F and I runs within its *window*, from its *head* to its *last* end:

    0              head                      last             T
    |----------------|==== the action runs ===|---------------|
     what must come                            what must come
     before it                                 after it

Two rules narrow the windows in turn, until nothing changes:

1. Ways of microbatches: F of a stage begins after F of the stage before it and the hop between them, and I after I of
   the next stage. Microbatches are alike, so we number them in the order in which they run: on a stage, F and I of
   microbatch m begin after those of microbatch m - 1.
2. Walks of devices: a device does one action at a time, so it *walks* from state to state. A *state* is how many F, I
   and W of each of its stages are done. A walk passes only states that fit the memory. Each state has a soonest time,
   from the states before it and the heads, and a latest time, from the states after it and the last ends. An action
   keeps the window in which some walk can do it.

If a device then has no walk, or an action no window, there is no schedule of step T. The rules keep the walks of every
such schedule, so the proof holds for any order of work.

The bound may be below the shortest step, because the windows of two actions may come from two different walks.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from fxsplit.schedule.kernels import walks
from fxsplit.schedule.kernels.instance import Floats, Instance, Ints
from fxsplit.schedule.solver.heads import HeadsAndTails

PRECISE = 2e-7
"""The bisection ends within this share of the largest step that windows refute."""
ROUNDS = 60
"""The most rounds over all devices in one proof. Without a proof by then, the step is not refuted."""


class States(NamedTuple):
    """The states of a device that fit its memory, and the moves between them.

    The *chain* is what a device does with each microbatch, in order: F of each of its stages (chunks 0, 1, ...), then I
    of each, backwards. For two chunks:

        chain     F0    F1    I1    I0
        done       5     3     3     2
        between       2     0     1         microbatches that have passed one place of the chain, and not the next

    A state here is how many microbatches are between the places, and how many W wait. How many I0 are done is not part
    of it, since memory does not depend on that.

    - `between`: [states, chain - 1]
    - `follow`: [states, moves], the state after each F and I of the chain and after each W, or -1 if it does not fit
    - `empty`: the state with no microbatch between the places and no waiting W
    """

    between: Ints
    follow: Ints
    empty: int


def list_states(one: Instance, device: int, limit: int) -> States | None:
    """Return the states of a device that fit its memory, or None if there are more than `limit`."""
    n, own = one.n_microbatches, one.stages[device]
    v = len(own)
    held, late = one.held[own], one.late[own]
    # A microbatch between places j and j + 1 of the chain holds memory in each chunk after its F and before its I.
    sizes = [held[: 1 + min(j, 2 * v - 2 - j)].sum() for j in range(2 * v - 1)]
    alike = share_weights(one, device)
    waiting = [late[0]] if alike else list(late)
    # A row is a state, and rows are sorted by their columns from left to right. With the end of the chain first and the
    # waiting W counted down, every move but the last I of the chain leads to a later row. walk_device needs this.
    columns = [
        *((size, n, False) for size in reversed(sizes)),
        *((size, n * v if alike else n, True) for size in reversed(waiting)),
    ]
    rows, used = np.zeros((1, 0), np.int64), np.zeros(1)
    for size, most, down in columns:
        room = (one.memory[device] - used + 1e-9) / size if size > 0 else np.full(len(used), np.inf)
        count = 1 + np.minimum(np.floor(room), most).astype(np.int64)
        if count.sum() > limit:
            return None
        ends = np.cumsum(count)
        column = np.arange(ends[-1]) - np.repeat(ends - count, count)
        if down:
            column = np.repeat(count, count) - 1 - column
        rows, used = np.column_stack([np.repeat(rows, count, axis=0), column]), np.repeat(used, count) + size * column
        keep = rows[:, : 2 * v - 1].sum(axis=1) <= n
        rows, used = rows[keep], used[keep]
    return _link(rows, v, alike)


def share_weights(one: Instance, device: int) -> bool:
    """Return whether the W of all chunks of a device are alike in time and memory."""
    own = one.stages[device]
    return all(len(set(figures[own])) == 1 for figures in (one.weight, one.held, one.late))


def _link(rows: Ints, v: int, alike: bool) -> States:
    """Return the states in these rows, and the state after each move.

    `v` is the number of chunks. If the W of all chunks are `alike`, a row has one column for all of them.
    """
    places = 2 * v - 1
    tops = rows.max(axis=0)
    down = np.arange(rows.shape[1]) >= places
    digits = np.where(down, tops - rows, rows)
    radix = np.append(np.cumprod((tops + 1)[:0:-1])[::-1], 1)
    # The key of a row is the number that its columns spell. Rows are in ascending order of their keys.
    keys = digits @ radix
    waiting = rows.shape[1] - places
    follow = np.full((len(rows), 2 * v + waiting), -1, np.int64)

    def column(place: int) -> int:
        return places - 1 - place

    def weight_column(chunk: int) -> int:
        return int(places + waiting - 1 - chunk * (not alike))

    for move in range(2 * v + waiting):
        change = np.zeros(rows.shape[1], np.int64)
        if move < 2 * v:
            if move < places:
                change[column(move)] += 1
            if move:
                change[column(move - 1)] -= 1
            if move >= v:
                change[weight_column(2 * v - 1 - move)] += 1
        else:
            change[weight_column(move - 2 * v)] -= 1
        after = rows + change
        legal = ((after >= 0) & (after <= tops)).all(axis=1)
        wanted = keys + np.where(down, -change, change) @ radix
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        found = legal & (keys[at] == wanted)
        follow[found, move] = at[found]
    between = np.ascontiguousarray(rows[:, :places][:, ::-1])
    empty = int(np.flatnonzero((rows == 0).all(axis=1))[0])
    return States(between, follow, empty)


class WindowBound:
    """Proofs by windows for one instance.

    - `heads`: its heads and tails
    - `limit`: the most states of a device. In `limit` and `size`, a state counts once for each number of I0 done
    - `states`: the states of each device, up to the first device that has too many
    - `complete`: whether `states` has all devices. Only then call `refutes`
    - `size`: the number of states in all
    """

    def __init__(self, one: Instance, heads: HeadsAndTails, limit: int):
        self.one, self.heads = one, heads
        self.states: list[States] = []
        known: dict[tuple[float, ...], States | None] = {}
        for r, own in enumerate(one.stages):
            key = (one.memory[r], *one.held[own], *one.late[own], share_weights(one, r))
            if key not in known:
                known[key] = list_states(one, r, limit // (one.n_microbatches + 1))
            found = known[key]
            if found is None:
                break
            self.states.append(found)
        self.complete = len(self.states) == one.n_devices
        self.size = (one.n_microbatches + 1) * sum(len(s.between) for s in self.states)

    def refutes(self, step: float, deadline: float) -> bool:
        """Return True if windows prove that no schedule has a step of `step` ms or less.

        Return False after the `deadline`, in seconds of time.monotonic().
        """
        one = self.one
        tiny = 1e-9 * step
        head = self.heads.head.copy()
        last = step - self.heads.tail
        times = np.stack([one.forward, one.input])[:, :, None]
        changed = np.ones(one.n_devices, np.bool_)
        for turn in range(ROUNDS):
            walks.spread(one, step, head, last, changed, tiny)
            if (head + times > last + 2 * tiny).any():
                return True
            if not changed.any():
                return False
            order = range(one.n_devices) if turn % 2 == 0 else range(one.n_devices - 1, -1, -1)
            for r in order:
                if time.monotonic() > deadline:
                    return False
                if changed[r]:
                    changed[r] = False
                    if not self._narrow(r, step, head, last, tiny):
                        return True
                    walks.spread(one, step, head, last, changed, tiny)
        return False

    def _narrow(self, r: int, step: float, head: Floats, last: Floats, tiny: float) -> bool:
        """Narrow the windows of a device to the times of its walks; return whether it has a walk."""
        one, n, states = self.one, self.one.n_microbatches, self.states[r]
        own = one.stages[r]
        back = own[::-1]
        v = len(own)
        # One kind of W if those of all chunks are alike.
        kinds = states.follow.shape[1] - 2 * v
        times = np.concatenate([one.forward[own], one.input[back], one.weight[own[:kinds]]])
        old_head, old_last = (np.concatenate([x[0, own], x[1, back]]) for x in (head, last))
        new_head, new_last = np.empty_like(old_head), np.empty_like(old_last)
        room = np.empty((2, n + 1, len(states.between)))
        if not walks.walk_device(
            n, times, old_head, old_last, states.between, states.follow, states.empty, step, tiny, room[0], room[1],
            new_head, new_last,
        ):  # fmt: skip
            return False
        for kind, stages, part in ((0, own, slice(0, v)), (1, back, slice(v, 2 * v))):
            head[kind, stages] = np.maximum(head[kind, stages], new_head[part])
            last[kind, stages] = np.minimum(last[kind, stages], new_last[part])
        return True


def prove_bound(proofs: WindowBound, low: float, high: float, deadline: float) -> float:
    """Find by bisection the largest step that windows refute, and return it as a lower bound in ms.

    `low` is a known lower bound, and is returned if windows refute no longer step. `high` is the step of a schedule.
    Stop at the `deadline`, in seconds of time.monotonic().
    """
    # Most searches need only these two proofs: the other bounds are close, or the schedule is optimal.
    if not proofs.refutes(low * (1 + PRECISE), deadline):
        return low
    if proofs.refutes(high * (1 - PRECISE), deadline):
        return high * (1 - PRECISE)
    while high - low > PRECISE * high and time.monotonic() < deadline:
        middle = (low + high) / 2
        if proofs.refutes(middle, deadline):
            low = middle
        elif time.monotonic() < deadline:
            high = middle
    return low
