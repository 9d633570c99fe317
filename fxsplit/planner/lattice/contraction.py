"""Contraction: blocks without cost join a neighbour where no plan becomes worse, so that the lattice shrinks.

A mask that only one layer reads may lie in any stage up to that layer's. So it doubles the number of ideals before the
layer, although its place makes no difference. Let v be a block that takes no time and no memory, and u a neighbour.
To move v into the stage of u costs nothing for computing. What stages pay for tensors does not grow either if every
tensor that v makes or reads is made or read by u too: the stage of v stops paying, and the stage of u pays already. If
u is the only neighbour of v on one side, v may also have tensors of its own, if they are no larger than those that only
u and v share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from functools import cached_property, reduce
from operator import or_

import numpy as np

from fxsplit.ir.facts.costs.costs import Costs, NodeCost
from fxsplit.ir.facts.lattice.antichains import Slack
from fxsplit.ir.facts.lattice.blocks import Blocks
from fxsplit.planner.lattice.cuts import MOST_ANCESTORS

MOST_COPIES, MOST_IN_FLIGHT = 2e6, 1e6
"""More copies of a parameter, and more microbatches, than any optimizer and schedule makes a device hold."""

TAIL = ("forward_ms", "backward_ms", "host_ms", "parameter_bytes", "forward_launch_ms", "backward_launch_ms")
"""The figures by which a stage becomes slower that takes a block more; the order of the fields of Slack."""

CALLER = -1
"""Stands for who calls the model: the maker of its inputs and the reader of its outputs."""


def contract_costless_nodes(costs: Costs, blocks: Blocks, apart: Collection[str], memory_bytes: float) -> Blocks:
    """Return the blocks after joining costless ones to neighbours; nodes in `apart` (pinned ones) stay as they are.

    `memory_bytes` is the smallest device's: memory is no cost where the whole graph fits there.
    """
    bounded = memory_may_bind(costs, memory_bytes)
    # A pinned block has a stage of its own to go to, and nothing may follow it there unasked.
    free = [not set(names) & set(apart) for names in blocks.members]
    light = [
        free[b] and not any(_weighs(costs.by_name[n], bounded) for n in names) for b, names in enumerate(blocks.members)
    ]
    if not any(light):
        return blocks
    graph = _Graph(costs, blocks)
    # In the order of the blocks, so that the result does not depend on the order of sets.
    waiting = [b for b, is_light in enumerate(light) if is_light]
    # A block that has joined another may clear the way for the next one: go on until nothing changes.
    changed = True
    while changed:
        changed = False
        for b in list(waiting):
            target = graph.target(b)
            if target is not None and free[target]:
                graph.join(b, target)
                waiting.remove(b)
                changed = True
    return blocks.joined(graph.groups(), costs) if len(graph.groups()) < len(blocks) else blocks


def memory_may_bind(costs: Costs, memory_bytes: float) -> bool:
    """Return whether the whole graph might not fit on a device with so much memory."""
    most = sum(n.parameter_bytes * MOST_COPIES + n.buffer_bytes + n.kept_bytes * MOST_IN_FLIGHT for n in costs.nodes)
    if costs.weighed:
        # No node needs more besides than what it allocates, and all values and gradients there are.
        peaks = max(
            (max(n.forward_peak_bytes or 0.0, n.backward_peak_bytes, n.halved_peak_bytes) for n in costs.nodes),
            default=0.0,
        )
        there = sum(max(n.unkept_bytes, n.output_bytes) + n.gradient_bytes for n in costs.nodes)
        most += peaks + there * MOST_IN_FLIGHT + sum(n.waiting_bytes for n in costs.nodes) * MOST_IN_FLIGHT
        most += sum(i.output_bytes + i.gradient_bytes for i in costs.inputs) * MOST_IN_FLIGHT
    return most > memory_bytes


def contract_light_nodes(
    costs: Costs, blocks: Blocks, apart: Collection[str], light_ms: float, ms_per_byte: float = 0.0
) -> tuple[Blocks, Slack]:
    """Return the blocks after light ones join what they follow, and by how much that may slow the best plan.

    A block joins its only predecessor u if u has no other successor, if what the block sends on is no larger than what
    it gets from u, and if all that joins u takes at most `light_ms`. A byte of parameters counts `ms_per_byte`, which
    is what replicas take to sum its gradients. What joins u is the *tail* of the group of u.

    The bound: any plan can be changed to keep groups whole, if a stage also does the tails of the groups that were cut
    at its end. No two groups that are cut at the same place lie on one path of the graph. So along each path at most
    one tail counts. Cover all groups with paths, and sum the largest tail of each path.
    """
    # What a stage takes longer for a block: computing, on a host, parameters that its replicas sum up, launching.
    figures = np.array(
        [[sum(getattr(costs.by_name[name], figure) for name in names) for figure in TAIL] for names in blocks.members],
        np.float64,
    ).reshape(-1, len(TAIL))
    # A host may take longer than an accelerator, and launching longer than both: the largest keeps the bound honest.
    times = figures[:, 0] + figures[:, 1], figures[:, 2], figures[:, 4] + figures[:, 5]
    weight = np.maximum.reduce(times) + figures[:, 3] * ms_per_byte
    free = [not set(names) & set(apart) for names in blocks.members]
    graph = _Graph(costs, blocks)
    # The blocks of each tail, by the block that they have joined, and what the tail weighs.
    tails: dict[int, list[int]] = defaultdict(list)
    tail_ms = np.zeros(len(blocks))
    heavy = weight > light_ms
    for b in range(len(blocks)):
        follows = None if heavy[b] or not free[b] else graph.find_link(b)
        if follows is None or not free[follows] or tail_ms[follows] + weight[b] > light_ms:
            continue
        graph.join(b, follows)
        tails[follows].append(b)
        tail_ms[follows] += weight[b]
    joined = {b for members in tails.values() for b in members}
    # Cover the groups with paths: each group goes on with the path of a group before it, if one ends there.
    path_of: dict[int, int] = {}
    end_of: dict[int, int] = {}  # the last group of each path -> the path
    for b in range(len(blocks)):
        if b not in joined:
            path = next((end_of.pop(a) for a in sorted(graph.before[b]) if a in end_of), b)
            end_of[b] = path_of[b] = path
    cut = [b for b in path_of if tails[b]]
    sums = np.array([figures[tails[b]].sum(axis=0) for b in cut]).reshape(-1, len(TAIL))
    paths = np.array([path_of[b] for b in cut], np.int32)
    slack = Slack(path=paths, weighed_ms_per_byte=ms_per_byte, **dict(zip(TAIL, sums.T, strict=True)))
    return blocks.joined(graph.groups(), costs), slack


def _weighs(node: NodeCost, bounded: bool) -> bool:
    """Return whether a node takes any time, or memory where that is bounded.

    Parameters always weigh: replicas of a stage take time to sum their gradients.
    """
    if node.forward_ms or node.backward_ms or node.host_ms or node.launch_ms or node.parameter_bytes:
        return True
    # What allocates nothing may still run while much is there.
    return bounded and (bool(node.buffer_bytes or node.kept_bytes) or node.forward_peak_bytes is not None)


class _Graph:
    """The blocks while they are joined: who is next to whom, and which tensors are where."""

    def __init__(self, costs: Costs, blocks: Blocks) -> None:
        self._blocks = blocks
        # By block: the groups just before it, and those just behind.
        self.before = [set(b) for b in blocks.before]
        self._after = [set(a) for a in blocks.after]
        self._group = [[b] for b in range(len(blocks))]
        self.pins_of: list[set[int]] = []
        # The bytes of each tensor, as they are and as they are sent.
        self._size: list[tuple[float, float]] = []
        self._at: dict[int, set[int]] = defaultdict(set)
        for name, forward, backward, readers, is_output in costs.values:
            outside = [CALLER] if is_output or name not in blocks.home else []
            made = [name] if name in blocks.home else []
            self._add(
                {*outside, *(blocks.home[n] for n in (*made, *readers))}, forward + backward, sum(costs.sent[name])
            )
        for exchange in costs.exchanges:
            self._add({blocks.home[n] for n in exchange.nodes}, exchange.output_bytes, exchange.output_bytes)

    @cached_property
    def _ancestors(self) -> list[int]:
        """Bit masks of all blocks before each one, and the block itself; of very many blocks those next to it alone.

        They stay right while costless blocks are joined, which adds no path between others.
        """
        masks: list[int] = []
        many = len(self._blocks) > MOST_ANCESTORS
        for b, before in enumerate(self._blocks.before):
            masks.append(reduce(or_, ((1 << a if many else masks[a]) for a in before), 1 << b))
        return masks

    def _add(self, pins: set[int], size: float, sent: float) -> None:
        """Add a tensor, unless it crosses no cut or costs nothing."""
        if len(pins) < 2 or size <= 0:
            return
        for pin in pins:
            self._at[pin].add(len(self.pins_of))
        self.pins_of.append(pins)
        self._size.append((size, sent))

    def target(self, b: int) -> int | None:
        """Return the neighbour that a costless block may join, or None."""
        before, after = self.before[b], self._after[b]
        # A block that nothing is joined to may go anywhere.
        if not before and not after and not self._at[b]:
            return next((c for c, group in enumerate(self._group) if c != b and group), None)
        # The latest neighbour before b must come after all the others, or joining it would close a cycle.
        if before:
            latest = max(before)
            if all(self._ancestors[latest] >> a & 1 for a in before) and self._at[b] <= self._at[latest]:
                return latest
        if after:
            earliest = min(after)
            if all(self._ancestors[a] >> earliest & 1 for a in after) and self._at[b] <= self._at[earliest]:
                return earliest
        # An only neighbour whose only neighbour is b: a link of a chain.
        link = self.find_link(b)
        return self.find_link(b, ahead=True) if link is None else link

    def find_link(self, b: int, *, ahead: bool = False) -> int | None:
        """Return the only group before `b`, or `ahead` of `b`, if `b` is its only neighbour on that side.

        `b` must not send on more than it gets from that group, or get more than it sends to it.
        """
        near, back = (self._after, self.before) if ahead else (self.before, self._after)
        if len(near[b]) != 1:
            return None
        (only,) = near[b]
        if back[only] != {b}:
            return None
        # Of values that are compressed neither the memory nor the bytes that cross may be more.
        own, between = self._own(b, only), self._between(b, only)
        return only if all(sum(s[i] for s in own) <= sum(s[i] for s in between) for i in (0, 1)) else None

    def _own(self, b: int, other: int) -> list[tuple[float, float]]:
        """Return the bytes of tensors at `b` that are not at `other`."""
        return [self._size[t] for t in self._at[b] - self._at[other]]

    def _between(self, b: int, other: int) -> list[tuple[float, float]]:
        """Return the bytes of tensors that are at `b` and `other` alone."""
        return [self._size[t] for t in self._at[b] & self._at[other] if self.pins_of[t] == {b, other}]

    def join(self, b: int, target: int) -> None:
        """Make `b` a part of `target`."""
        self._group[target] += self._group[b]
        self._group[b] = []
        for a in self.before[b]:
            self._after[a].discard(b)
        for a in self._after[b]:
            self.before[a].discard(b)
        for a in self.before[b] - {target}:
            self._after[a].add(target)
            self.before[target].add(a)
        for a in self._after[b] - {target}:
            self.before[a].add(target)
            self._after[target].add(a)
        # The tensors at b are at the target now.
        for t in self._at.pop(b, set()):
            self.pins_of[t] = self.pins_of[t] - {b} | {target}
            self._at[target].add(t)
            # A tensor inside one group crosses no cut any more.
            if len(self.pins_of[t]) == 1:
                self._at[target].discard(t)

    def groups(self) -> list[list[int]]:
        """Return the blocks of each group."""
        return [group for group in self._group if group]
