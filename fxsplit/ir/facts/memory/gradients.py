"""Follow the gradients of values and of tied weights through the backward of a stage, from node to node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fxsplit.ir.facts.costs.costs import Costs, NodeCost


def runs_nothing(node: NodeCost) -> bool:
    """Return whether a node only fetches an attribute, such as a weight."""
    return node.op.startswith("get_attr")


def is_part_of_several(node: NodeCost) -> bool:
    """Return whether a node only takes one of the several outputs of another node."""
    return node.op == "call_function:getitem" and bool(node.inputs)


@dataclass(eq=False)
class _Memory:
    """A piece of memory that holds gradients.

    - `size`: its bytes
    - `holders`: the number of gradients in it
    - `foreign`: another stage owns the memory, and it is counted elsewhere
    """

    size: float
    holders: int = 1
    foreign: bool = False


@dataclass
class _Gradient:
    """The sum of the gradients of a value that have arrived so far.

    `owned`: nothing else shares the memory, so the next gradient may be added in place.
    """

    memory: _Memory
    owned: bool


class BackwardGradients:
    """The gradients of values that exist while a backward runs. `bytes` is their memory, without foreign memory."""

    def __init__(self, costs: Costs, sizes: Mapping[str, float]) -> None:
        self.bytes = 0.0
        self._costs = costs
        self._sizes = sizes
        self._found: dict[str, _Gradient] = {}
        # Foreign memory that the delayed gradients of weights need -> its bytes. After the first half of a backward
        # nothing else holds this memory.
        self.left_behind: dict[_Memory, float] = {}
        # Node with several outputs -> the gradients of its outputs that have arrived, until its backward runs.
        self._pending: dict[str, list[_Memory]] = {}

    def start(self, name: str, *, foreign: bool) -> None:
        """Let the gradient of a value arrive from outside the stage.

        foreign: the memory of the gradient belongs to another stage or to the caller, who counts it.
        """
        size = self._sizes[name]
        self._found[name] = _Gradient(_Memory(size, 1, foreign), owned=False)
        self.bytes += 0.0 if foreign else size

    def find_pending(self, name: str) -> float:
        """Return the bytes of the gradients that have arrived for the outputs of a node with several outputs."""
        return sum(memory.size for memory in self._pending.get(name, ()))

    def find_left(self, *, own: bool = False) -> float:
        """Return the bytes of all existing gradients, each piece of memory once. `own` leaves out foreign memory."""
        left = {id(g.memory): g.memory for g in self._found.values()}
        return sum(m.size for m in left.values() if not (own and m.foreign))

    def hand_back(self, node: NodeCost) -> float:
        """Run the backward of a node: let the gradients of the values that it reads arrive.

        Return the bytes that are needed in addition, only while gradients are added up.
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
        """Add a gradient to the gradient of a value. Return the extra bytes that exist only during the addition."""
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
        """Free the gradient of a node after its backward.

        Keep it if the gradients of the node's weights are delayed (`waits`).
        Return the bytes that the delayed gradients keep, and that nothing else counts.
        """
        for memory in self._pending.pop(node.name, ()):
            self._release(memory)
        arrived = self._found.pop(node.name, None)
        if arrived is None:
            return node.waiting_bytes if waits else 0.0
        if waits:
            # The gradient stays in memory, and its bytes still count. The owner of foreign memory releases it after
            # the first half of the backward.
            if arrived.memory.foreign:
                self.left_behind[arrived.memory] = arrived.memory.size
            return max(node.waiting_bytes - arrived.memory.size, 0.0)
        if is_part_of_several(node):
            self._pending.setdefault(node.inputs[0], []).append(arrived.memory)
            return 0.0
        self._release(arrived.memory)
        return 0.0

    def _release(self, memory: _Memory) -> float:
        """Remove one gradient from a piece of memory.

        Return the bytes that become free: 0 if other gradients are still there.
        """
        memory.holders -= 1
        freed = 0.0 if memory.holders or memory.foreign else memory.size
        self.bytes -= freed
        return freed


class TiedGradients(NamedTuple):
    """Memory for the gradients of tied parameters: parameters that several nodes of a stage use.

    Each field maps the position of a node to bytes, from the moment at which the backward of this node has run.
    - `change`: the change of the bytes that exist
    - `more`: the bytes that exist only for a moment, while two gradients are added into a third
    - `again`: the bytes of the node's parameters whose sums an earlier node has made
    """

    change: Mapping[int, float]
    more: Mapping[int, float]
    again: Mapping[int, float]


def find_ties(costs: Costs, position: Mapping[str, int]) -> TiedGradients:
    """Return the memory for gradients of tied parameters.

    Autograd adds up the gradients of all users of a parameter first.
    """
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
