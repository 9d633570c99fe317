"""Windows: prove that no schedule has a step of T ms, by the times within which each action must run.

Take any schedule of step T or less. Its F of microbatch m on stage s begins no earlier than its *head*, and ends no
later than its *last* end, so that all that must come before and after it has time; likewise each I.

1. Ways: F of a stage begins after F of the stage before it and the hop between them; I after I of the next stage.
   Microbatches keep their order, since they are all alike: sort the begins of each kind.
2. Devices: a device does one thing at a time, so it walks from state to state. A state is how many F, I and W of each
   of its stages are done. Only states within memory count. The soonest time of a state follows from those before it
   and from the heads, the latest one from those after it and from the last ends. An action that no walk can do within
   these times keeps no window.

Each finding narrows the windows of other devices, until nothing changes. If a device then has no walk, or an action no
window, there is no schedule of step T. Every schedule's walk was kept, so nothing is assumed of the order of work.

The state counts W only by number, oldest first if the W of a device's stages are alike. What is forgotten: that the F
and the I of one microbatch belong to one walk, so the bound may be below the shortest step.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from fxsplit.schedule.kernels import walks
from fxsplit.schedule.kernels.instance import Floats, Instance, Ints
from fxsplit.schedule.solver.heads import Windowed

PRECISE = 2e-7
"""How close the bound comes to the largest step that windows refute, as a share of it."""
ROUNDS = 60


class States(NamedTuple):
    """The states of a device, apart from how many I of its first stage are done, and the moves between them.

    - `between`: [states, chain - 1]: the chain is F of each chunk and then I of each chunk, backwards; each is done at
      least as often as the next. `between` says how much more often.
    - `follow`: [states, moves], the state after each F, I and W, or -1 if it does not fit
    - `empty`: the state in which nothing is in flight
    """

    between: Ints
    follow: Ints
    empty: int


def list_states(one: Instance, device: int, limit: int) -> States | None:
    """Return the states of a device that fit its memory, or None if there are more than `limit`."""
    n, own = one.n_microbatches, one.stages[device]
    v = len(own)
    held, late = one.held[own], one.late[own]
    # Between place j of the chain and the next are the microbatches held by the chunks that are there.
    weights = [held[: 1 + min(j, 2 * v - 2 - j)].sum() for j in range(2 * v - 1)]
    alike = share_weights(one, device)
    waiting = [late[0]] if alike else list(late)
    # Columns in this order, the last of the chain first and W counted down, so that a move leads to a later row.
    columns = [
        *((g, n, False) for g in reversed(weights)),
        *((g, n * v if alike else n, True) for g in reversed(waiting)),
    ]
    rows, used = np.zeros((1, 0), np.int64), np.zeros(1)
    for gram, most, down in columns:
        room = (one.memory[device] - used + 1e-9) / gram if gram > 0 else np.full(len(used), np.inf)
        count = 1 + np.minimum(np.floor(room), most).astype(np.int64)
        if count.sum() > limit:
            return None
        ends = np.cumsum(count)
        column = np.arange(ends[-1]) - np.repeat(ends - count, count)
        if down:
            column = np.repeat(count, count) - 1 - column
        rows, used = np.column_stack([np.repeat(rows, count, axis=0), column]), np.repeat(used, count) + gram * column
        keep = rows[:, : 2 * v - 1].sum(axis=1) <= n
        rows, used = rows[keep], used[keep]
    return _link(rows, v, alike)


def share_weights(one: Instance, device: int) -> bool:
    """Return whether the W of all chunks of a device are alike."""
    own = one.stages[device]
    return all(len(set(figures[own])) == 1 for figures in (one.weight, one.held, one.late))


def _link(rows: Ints, v: int, alike: bool) -> States:
    """Return the states with these columns, and the state after each move."""
    places = 2 * v - 1
    tops = rows.max(axis=0)
    down = np.arange(rows.shape[1]) >= places
    digits = np.where(down, tops - rows, rows)
    radix = np.append(np.cumprod((tops + 1)[:0:-1])[::-1], 1)
    # Rows are in ascending order of their keys.
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
    """The proofs for one instance. `states` are those of each device; `size` is how many there are in all."""

    def __init__(self, one: Instance, windowed: Windowed, limit: int):
        self.one, self.windowed = one, windowed
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
        """Return whether no schedule has a step of `step` ms; False after the deadline, of time.monotonic."""
        one = self.one
        tiny = 1e-9 * step
        head = self.windowed.head.copy()
        last = step - self.windowed.tail
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
        """Narrow the windows of a device by its walks; return whether it has one."""
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
    """Return the largest step from `low` on that windows refute, by bisection; at most `high`, a step that exists."""
    # Most searches end here: the other bounds are close, or the schedule is optimal.
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
