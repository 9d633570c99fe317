"""Follow the gradients of values and of tied weights through the backward of a stage, from node to node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fxsplit.ir.facts.costs.costs import Costs, NodeCost


def runs_nothing(node: NodeCost) -> bool:
    """Return whether a node only fetches an attribute."""
    return node.op.startswith("get_attr")


def is_part_of_several(node: NodeCost) -> bool:
    """Return whether a node only fetches one of several outputs of another node."""
    return node.op == "call_function:getitem" and bool(node.inputs)


@dataclass(eq=False)
class _Memory:
    """A piece of memory with gradients: its bytes, the number of gradients in it, and whether its owner counts it."""

    size: float
    holders: int = 1
    foreign: bool = False


@dataclass
class _Gradient:
    """The gradient of a value, as far as it has arrived: its memory, and whether it may be added to in place."""

    memory: _Memory
    owned: bool


class BackwardGradients:
    """The gradients of values that exist while a backward runs; `bytes` counts their own memory."""

    def __init__(self, costs: Costs, sizes: Mapping[str, float]) -> None:
        self.bytes = 0.0
        self._costs = costs
        self._sizes = sizes
        self._found: dict[str, _Gradient] = {}
        # Foreign memory that waiting weights need, and that only they hold after the first half of a backward; by its
        # object.
        self.left_behind: dict[_Memory, float] = {}
        # The gradients of several outputs of a node, until its backward runs.
        self._pending: dict[str, list[_Memory]] = {}

    def start(self, name: str, *, foreign: bool) -> None:
        """Let the gradient of a value arrive from after the stage; the memory of a `foreign` one is counted already."""
        size = self._sizes[name]
        self._found[name] = _Gradient(_Memory(size, 1, foreign), owned=False)
        self.bytes += 0.0 if foreign else size

    def find_pending(self, name: str) -> float:
        """Return the bytes of gradients that wait for a node with several outputs."""
        return sum(memory.size for memory in self._pending.get(name, ()))

    def find_left(self, *, own: bool = False) -> float:
        """Return the bytes of all existing gradients, each piece of memory once; with `own` without foreign memory."""
        left = {id(g.memory): g.memory for g in self._found.values()}
        return sum(m.size for m in left.values() if not (own and m.foreign))

    def hand_back(self, node: NodeCost) -> float:
        """Let the gradients that a node's backward returns arrive.

        Return the bytes that are needed for a moment besides.
        """
        arrived, most = self._found.get(node.name), 0.0
        reads = [name for name in dict.fromkeys(node.inputs) if self._sizes.get(name)]
        lends = arrived is not None and 0 < node.lent_bytes >= sum(self._sizes[name] for name in reads)
        for name in reads:
            maker = self._costs.by_name.get(name)
            # A parameter's gradient goes to its sum at once.
            if maker is not None and runs_nothing(maker):
                continue
            if lends and arrived is not None:
                memory = arrived.memory
                memory.holders += 1
            else:
                memory = _Memory(self._sizes[name])
                self.bytes += memory.size
            most = max(most, self._add(name, memory, owned=not lends))
        return most

    def _add(self, name: str, memory: _Memory, *, owned: bool) -> float:
        """Add a gradient to the gradient of a value; return the bytes that the sum needs for a moment besides."""
        before = self._found.get(name)
        if before is None:
            self._found[name] = _Gradient(memory, owned)
            return 0.0
        # torch's engine adds in place to a gradient that shares its memory with nothing else, and otherwise makes a
        # third tensor.
        if before.owned:
            self._release(memory)
            return 0.0
        made = _Memory(self._sizes[name])
        self._found[name] = _Gradient(made, owned=True)
        self.bytes += made.size
        freed = self._release(memory) + self._release(before.memory)
        return freed

    def leave(self, node: NodeCost, *, waits: bool) -> float:
        """Free the gradient of a node, unless its weights wait with it.

        Return the waiting bytes that are not yet counted.
        """
        for memory in self._pending.pop(node.name, ()):
            self._release(memory)
        arrived = self._found.pop(node.name, None)
        if arrived is None:
            return node.waiting_bytes if waits else 0.0
        if waits:
            # It stays in memory, and its bytes still count. Foreign memory is released by its owner after the first
            # half.
            if arrived.memory.foreign:
                self.left_behind[arrived.memory] = arrived.memory.size
            return max(node.waiting_bytes - arrived.memory.size, 0.0)
        if is_part_of_several(node):
            self._pending.setdefault(node.inputs[0], []).append(arrived.memory)
            return 0.0
        self._release(arrived.memory)
        return 0.0

    def _release(self, memory: _Memory) -> float:
        """Free one gradient; return the bytes that this frees."""
        memory.holders -= 1
        freed = 0.0 if memory.holders or memory.foreign else memory.size
        self.bytes -= freed
        return freed


class TiedGradients(NamedTuple):
    """Gradients of parameters that several nodes of a stage use, by the position of the node that just ran backward.

    - `change`: the bytes that exist from then on
    - `more`: the bytes needed for a moment, while two gradients are added into a third
    - `again`: the node's bytes of parameters with sums that were made after an earlier node
    """

    change: Mapping[int, float]
    more: Mapping[int, float]
    again: Mapping[int, float]


def find_ties(costs: Costs, position: Mapping[str, int]) -> TiedGradients:
    """Return the memory for gradients of tied parameters: autograd adds up all users' before they go to the sum."""
    change: dict[int, float] = {}
    more: dict[int, float] = {}
    again: dict[int, float] = {}
    for tie in costs.tied:
        size, places = tie.parameter_bytes, sorted(position[name] for name in tie.nodes if name in position)
        if len(places) > 1:
            first, *others, last = places
            change[last] = change.get(last, 0.0) + size
            change[first] = change.get(first, 0.0) - size
            for place in (first, *others):
                more[place] = more.get(place, 0.0) + size
            for place in (*others, last):
                again[place] = again.get(place, 0.0) + size
    return TiedGradients(change, more, again)
