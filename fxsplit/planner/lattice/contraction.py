"""Contraction: join a block without cost to a neighbour if no plan becomes worse, to shrink the lattice.

A mask that only one layer reads may lie in any stage up to the stage of that layer. This doubles the number of ideals
before the layer, although the position of the mask makes no difference:

    before:  x -> l1 -> l2 -> l3      after:  x -> l1 -> l2 -> (mask, l3)
             mask -----------/
             9 ideals                         5 ideals

Let v be a block that takes no time and no memory, and u a neighbour. Moving v into the stage of u adds no computing
time. It adds no traffic either if u also makes or reads every tensor of v: the stage of v stops paying for them, and
the stage of u pays already.

If u is the only block before v, and v the only block after u, v may have other tensors too: together no larger than the
tensors between u and v, and with values or gradients only if those have values or gradients. Then no bytes and no
message are added. The same holds with before and after exchanged.
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
"""More copies of a parameter than any optimizer holds, and more microbatches than any schedule holds at once."""

TAIL = ("forward_ms", "backward_ms", "host_ms", "parameter_bytes", "forward_launch_ms", "backward_launch_ms")
"""The costs that a stage gains with another block, in the order of Slack's fields."""

CALLER = -1
"""A pin for the program that calls the model: it makes the inputs and reads the outputs."""


def contract_costless_nodes(costs: Costs, blocks: Blocks, apart: Collection[str], memory_bytes: float) -> Blocks:
    """Join costless blocks to neighbours, and return the blocks. Nodes in `apart` (pinned nodes) stay unchanged.

    `memory_bytes` is the memory of the smallest device. If the whole graph fits there, memory counts as no cost.
    """
    bounded = memory_may_bind(costs, memory_bytes)
    # A pinned block has a prescribed stage. Nothing else may move there with it.
    free = [not set(names) & set(apart) for names in blocks.members]
    light = [
        free[b] and not any(_weighs(costs.by_name[n], bounded) for n in names) for b, names in enumerate(blocks.members)
    ]
    if not any(light):
        return blocks
    graph = _Graph(costs, blocks)
    # Iterate in block order, since the order of a set is not deterministic.
    waiting = [b for b, is_light in enumerate(light) if is_light]
    # A block that joins may make the next one joinable: repeat until nothing changes.
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
    """Return whether the whole graph might exceed a device of this memory."""
    most = sum(n.parameter_bytes * MOST_COPIES + n.buffer_bytes + n.kept_bytes * MOST_IN_FLIGHT for n in costs.nodes)
    if costs.weighed:
        # In addition a node needs at most its own peak and all live values and gradients.
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
    """Join light blocks to the blocks they follow; return the blocks and a bound on the loss.

    A block joins its only predecessor u under three conditions: u has no other successor, the block sends no more bytes
    than it receives from u, and everything joined to u takes at most `light_ms`. A byte of parameters counts
    `ms_per_byte`, the time that replicas take to reduce its gradient. The blocks joined to u form the *tail* of u's
    group:

        group of u                 u -> t1 -> t2      tail: t1, t2
        a plan that cuts inside    u | t1 -> t2       becomes a cut after the group, which costs the tail's time

    The bound: any plan becomes a plan that keeps groups whole if each stage also runs the tails of the groups cut at
    its end. Two groups cut at the same boundary never lie on one path of the graph, so each path contributes at most
    one tail. Cover all groups with paths, and sum the largest tail of each path.
    """
    # The cost of a block to a stage: compute time, time on a host, parameters that replicas reduce, launches.
    figures = np.array(
        [[sum(getattr(costs.by_name[name], figure) for name in names) for figure in TAIL] for names in blocks.members],
        np.float64,
    ).reshape(-1, len(TAIL))
    # The largest of device, host and launch time bounds all three.
    times = figures[:, 0] + figures[:, 1], figures[:, 2], figures[:, 4] + figures[:, 5]
    weight = np.maximum.reduce(times) + figures[:, 3] * ms_per_byte
    free = [not set(names) & set(apart) for names in blocks.members]
    graph = _Graph(costs, blocks)
    # For each block, the blocks of its tail and their total weight.
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
    # Cover the groups with paths: each group extends a path that ends at one of its predecessors, if there is one.
    path_of: dict[int, int] = {}
    end_of: dict[int, int] = {}  # last group of each path -> the path
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
    """Return whether a node has a cost in time, or in memory if that is `bounded`.

    Parameters always cost, because replicas reduce their gradients.
    """
    if node.forward_ms or node.backward_ms or node.host_ms or node.launch_ms or node.parameter_bytes:
        return True
    # A node that allocates nothing may still run while much memory is in use, so any known peak counts.
    return bounded and (bool(node.buffer_bytes or node.kept_bytes) or node.forward_peak_bytes is not None)


class _Graph:
    """The blocks during joining: the neighbours of each group, and the tensors at each group."""

    def __init__(self, costs: Costs, blocks: Blocks) -> None:
        self._blocks = blocks
        # For each block, the groups directly before it and directly after it.
        self.before = [set(b) for b in blocks.before]
        self._after = [set(a) for a in blocks.after]
        self._group = [[b] for b in range(len(blocks))]
        self.pins_of: list[set[int]] = []
        # The bytes of each tensor: in memory, and as sent over a cut; and whether it has a value, and a gradient.
        self._size: list[tuple[float, float, bool, bool]] = []
        self._at: dict[int, set[int]] = defaultdict(set)
        for name, forward, backward, readers, is_output in costs.values:
            outside = [CALLER] if is_output or name not in blocks.home else []
            made = [name] if name in blocks.home else []
            size = forward + backward, sum(costs.sent[name]), forward > 0, backward > 0
            self._add({*outside, *(blocks.home[n] for n in (*made, *readers))}, size)
        for exchange in costs.exchanges:
            sent_bytes = exchange.output_bytes
            self._add({blocks.home[n] for n in exchange.nodes}, (sent_bytes, sent_bytes, False, sent_bytes > 0))

    @cached_property
    def _ancestors(self) -> list[int]:
        """Bit masks of each block with all its ancestors; in a very large graph, only with its direct predecessors.

        They remain valid while costless blocks join, since that adds no path between other blocks.
        """
        masks: list[int] = []
        many = len(self._blocks) > MOST_ANCESTORS
        for b, before in enumerate(self._blocks.before):
            masks.append(reduce(or_, ((1 << a if many else masks[a]) for a in before), 1 << b))
        return masks

    def _add(self, pins: set[int], size: tuple[float, float, bool, bool]) -> None:
        """Add a tensor, unless it can cross no cut or has no bytes."""
        if len(pins) < 2 or size[0] <= 0:
            return
        for pin in pins:
            self._at[pin].add(len(self.pins_of))
        self.pins_of.append(pins)
        self._size.append(size)

    def target(self, b: int) -> int | None:
        """Return the neighbour that costless block `b` may join, or None."""
        before, after = self.before[b], self._after[b]
        # An isolated block may join any group.
        if not before and not after and not self._at[b]:
            return next((c for c, group in enumerate(self._group) if c != b and group), None)
        # All predecessors must come before the latest one. Otherwise joining the latest would close a cycle.
        if before:
            latest = max(before)
            if all(self._ancestors[latest] >> a & 1 for a in before) and self._at[b] <= self._at[latest]:
                return latest
        if after:
            earliest = min(after)
            if all(self._ancestors[a] >> earliest & 1 for a in after) and self._at[b] <= self._at[earliest]:
                return earliest
        # A link of a chain: b and its neighbour have no other neighbour on that side.
        link = self.find_link(b)
        return self.find_link(b, ahead=True) if link is None else link

    def find_link(self, b: int, *, ahead: bool = False) -> int | None:
        """Return the only group before (or `ahead`: after) `b`, if `b` is its only neighbour there too.

        The tensors that `b` has elsewhere must be no larger than the tensors between the two, nor add a message.
        """
        near, back = (self._after, self.before) if ahead else (self.before, self._after)
        if len(near[b]) != 1:
            return None
        (only,) = near[b]
        if back[only] != {b}:
            return None
        # Compressed values count twice: neither their memory nor their bytes on the link may grow.
        own, between = self._own(b, only), self._between(b, only)
        smaller = all(sum(s[i] for s in own) <= sum(s[i] for s in between) for i in (0, 1))
        return (
            only if smaller and all(any(s[i] for s in between) or not any(s[i] for s in own) for i in (2, 3)) else None
        )

    def _own(self, b: int, other: int) -> list[tuple[float, float, bool, bool]]:
        """Return the sizes of tensors at `b` that are not at `other`."""
        return [self._size[t] for t in self._at[b] - self._at[other]]

    def _between(self, b: int, other: int) -> list[tuple[float, float, bool, bool]]:
        """Return the sizes of tensors that only `b` and `other` have."""
        return [self._size[t] for t in self._at[b] & self._at[other] if self.pins_of[t] == {b, other}]

    def join(self, b: int, target: int) -> None:
        """Move block `b` into the group `target`."""
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
        # The tensors of b are now at the target.
        for t in self._at.pop(b, set()):
            self.pins_of[t] = self.pins_of[t] - {b} | {target}
            self._at[target].add(t)
            # A tensor inside one group crosses no cut.
            if len(self.pins_of[t]) == 1:
                self._at[target].discard(t)

    def groups(self) -> list[list[int]]:
        """Return the blocks of each group."""
        return [group for group in self._group if group]
