"""Follow a stage through one microbatch, node by node, and say what it holds at most in each action.

The forward runs the nodes in the order of the graph, the backward runs theirs in the reverse order, as torch's engine
does. What a node allocates was measured, and what lives between nodes follows from who reads what:

- what autograd keeps of a node is there from its forward to its backward
- a value that nothing keeps is there until the last node that reads it has run
- the gradient of a value is there from the backward of the last node that reads it to that of the node that made it. A
  node may return the gradient that it was given, or parts of it, and then the two are one piece of memory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from fxsplit.ir.facts.costs import Costs, NodeCost
from fxsplit.ir.facts.edges import list_crossed

LOSS_COPIES = 1.0
"""What the backward of a loss allocates, in sizes of the model's outputs, besides the gradient that it returns.

No profile knows the loss. That of a cross entropy is the gradient of a logarithm for each output.
"""


LOSS_KEEPS = 1.0
"""What a loss keeps for its backward, in sizes of the model's outputs: these, or what a softmax makes of them."""


TOGETHER_BYTES = 1 << 16
"""Gradients of weights that were put off are added to their sums together, up to so many bytes."""


@dataclass(frozen=True, kw_only=True)
class MicrobatchMemory:
    """What a stage holds of one microbatch, in bytes; weights, sums of gradients and other microbatches aside.

    resting_bytes: between its forward and its backward. halfway_bytes: between the two halves of a divided backward.
    forward_bytes, whole_bytes, early_bytes, late_bytes: at most, while its forward, its backward, or the first or
    the second half of that run. sent_bytes, sent_gradient_bytes: values, and gradients, that it has made for other
    stages and that it does not hold by itself, until they are taken.
    """

    resting_bytes: float = 0.0
    halfway_bytes: float = 0.0
    forward_bytes: float = 0.0
    whole_bytes: float = 0.0
    early_bytes: float = 0.0
    late_bytes: float = 0.0
    sent_bytes: float = 0.0
    sent_gradient_bytes: float = 0.0


class Crossings(NamedTuple):
    """The names of the values that a stage takes from the stages before, and of those that it gives to later ones."""

    taken: Sequence[str]
    given: Sequence[str]


def list_crossings(costs: Costs, stage_of: Mapping[str, int], count: int) -> list[Crossings]:
    """Return the values that cross the two boundaries of each of `count` stages, where stages hand values on."""
    # Boundary b lies before stage b.
    crossing: list[list[str]] = [[] for _ in range(count + 1)]
    for name, _, _, readers, returned in costs.values:
        for boundary in list_crossed(stage_of, name, readers, count, returned=returned):
            crossing[boundary].append(name)
    return [Crossings(*both) for both in pairwise(crossing)]


def follow_stage(
    costs: Costs, names: Sequence[str], crossings: Crossings, *, recompute: bool, last: bool
) -> MicrobatchMemory:
    """Return what a stage holds in each action, of the nodes `names`, in the order of the graph.

    last: whether the loss is computed behind it. Every node's allocations are known (see `Costs.weighed`).
    """
    stage = _Stage(costs, names, crossings)
    kept, light = stage.run_forward(keeps=True), stage.run_forward(keeps=False)
    if costs.inference:
        # At rest are the values between stages, of a microbatch that has arrived or that was handed on.
        at_rest = stage.taken_bytes + stage.unkept_outputs
        sent = stage.made_bytes + stage.passed_bytes
        return MicrobatchMemory(resting_bytes=at_rest, forward_bytes=min(kept, light), sent_bytes=sent)
    loss, taken = stage.given_bytes * last, stage.taken_bytes
    # A stage that recomputes holds the outputs of the model as any other stage holds what it gives.
    ends = last and not recompute
    backward, gradients = stage.run_backward(ends=ends, divided=False)
    early, _ = stage.run_backward(ends=ends, divided=True)
    # What the loss keeps is freed with all the rest.
    early += LOSS_KEEPS * loss * ends
    halfway = stage.find_halfway(ends=ends) + LOSS_KEEPS * loss * ends
    late = halfway + stage.find_late()
    if not stage.waits:
        # Nothing is left for later, so that the first half is all of the backward, and frees all.
        early, late = backward, taken + (0.0 if ends else stage.unkept_outputs + stage.kept_outputs)
        halfway = late
    # The loss keeps what it needs of the outputs, and those that nothing keeps are freed behind it.
    resting = taken + stage.kept_bytes + (LOSS_KEEPS * loss if last else stage.unkept_outputs)
    forward = max(kept, taken + stage.kept_bytes + stage.unkept_outputs + (LOSS_KEEPS + LOSS_COPIES) * loss)
    losing = taken + stage.kept_bytes + (LOSS_KEEPS + LOSS_COPIES + 1.0) * loss
    sent = 0.0
    if recompute:
        # The outputs of the model are the start of the loss's own graph.
        forward = max(min(light, kept), taken + (1.0 + LOSS_KEEPS + LOSS_COPIES) * loss)
        resting = taken + (1.0 + LOSS_KEEPS) * loss
        # The gradients of the outputs are there, while the forward runs once more.
        losing = max(taken + (2.0 + LOSS_KEEPS + LOSS_COPIES) * loss, kept + stage.given_gradients)
        sent = 0.0 if last else stage.made_bytes
        # The outputs that the loss was computed from are there until the weights' gradients are.
        early += loss
    return MicrobatchMemory(
        resting_bytes=resting,
        halfway_bytes=halfway,
        forward_bytes=forward,
        whole_bytes=max(backward, losing),
        early_bytes=max(early, losing),
        late_bytes=late,
        sent_bytes=sent,
        sent_gradient_bytes=gradients,
    )


def runs_nothing(node: NodeCost) -> bool:
    """Return whether a node only fetches an attribute."""
    return node.op.startswith("get_attr")


def is_part_of_several(node: NodeCost) -> bool:
    """Return whether a node only fetches one of several values that another one has made."""
    return node.op == "call_function:getitem" and bool(node.inputs)


@dataclass(eq=False)
class _Memory:
    """One piece of memory with gradients: its bytes, how many gradients lie in it, and whether others hold it too."""

    size: float
    holders: int = 1
    foreign: bool = False


@dataclass
class _Gradient:
    """The gradient of a value that has arrived so far: where it lies, and whether it may be added to in place."""

    memory: _Memory
    owned: bool


class _Stage:
    """The nodes of a stage, the values that it takes from other stages, and those that it gives to them."""

    def __init__(self, costs: Costs, names: Sequence[str], crossings: Crossings) -> None:
        self._nodes = [costs.by_name[name] for name in names]
        self._costs = costs
        position = {name: i for i, name in enumerate(names)}
        values = [costs.value_of[name] for name in (*names, *(n for n in crossings.taken))]
        given = set(crossings.given)
        # The place of the last node that reads a value; behind all nodes for a value that other stages read.
        self._end = {
            v[0]: len(names) if v[0] in given else max([position[r] for r in v[3] if r in position], default=-1)
            for v in values
        }
        self._gradient_bytes = {v[0]: v[2] for v in values}
        size_of = {v[0]: v[1] for v in values}
        # Of the values that it gives, those that it makes. Others it only hands on.
        self._made = [name for name in crossings.given if name in position]
        self.taken_bytes = sum(size_of[name] for name in crossings.taken)
        self.passed_bytes = sum(size_of[name] for name in crossings.given if name not in position)
        self.made_bytes = sum(max(size_of[name], costs.by_name[name].storage_bytes) for name in self._made)
        self.given_bytes = sum(size_of[name] for name in crossings.given)
        self.given_gradients = sum(self._gradient_bytes[name] for name in crossings.given)
        self.kept_bytes = float(sum(n.kept_bytes for n in self._nodes))
        unkept = {name: costs.find_unkept(name, size_of[name]) for name in self._made}
        self.unkept_outputs = sum(unkept.values())
        self._kept_outputs = {name: size_of[name] - unkept[name] for name in self._made}
        self.kept_outputs = sum(self._kept_outputs.values())
        self.waits = any(n.late_peak_bytes > 0 for n in self._nodes)
        # Filled by a backward: what is there between its halves, gradients for other stages aside.
        self._waiting = 0.0
        self._ties = _find_ties(costs, position)

    def find_halfway(self, *, ends: bool) -> float:
        """Return what the stage holds between the halves of the backward that has run last."""
        return self.taken_bytes + self.kept_bytes + (0.0 if ends else self.unkept_outputs) + self._waiting

    def find_late(self) -> float:
        """Return what the second half of a backward allocates: for one node, and small gradients that go together."""
        waiting = [n for n in self._nodes if n.late_peak_bytes > 0]
        together = min(sum(n.parameter_bytes or n.late_peak_bytes for n in waiting), TOGETHER_BYTES)
        return max((n.late_peak_bytes for n in waiting), default=0.0) + together

    def run_forward(self, *, keeps: bool) -> float:
        """Return the most that the stage holds while its forward runs, with or without what a backward needs."""
        peak = now = self.taken_bytes
        ends: dict[int, float] = {}
        for i, node in enumerate(self._nodes):
            kept = node.kept_bytes if keeps else 0.0
            size = node.unkept_bytes if keeps else max(node.storage_bytes, node.unkept_bytes)
            peak = max(peak, now + max(node.forward_peak_bytes or 0.0, kept))
            now += kept
            # What nobody reads is gone at once.
            if self._end[node.name] > i:
                now += size
                ends[self._end[node.name]] = ends.get(self._end[node.name], 0.0) + size
            now -= ends.pop(i, 0.0)
        return max(peak, now)

    def run_backward(self, *, ends: bool, divided: bool) -> tuple[float, float]:
        """Return the most that the stage holds while its backward runs, and the gradients that it gives.

        ends: the gradients of the outputs are autograd's own, as those that a loss makes. divided: leave the gradients
            of weights for later, and free nothing.
        """
        run = _Backward(self._costs, self._gradient_bytes)
        kept, small, waiting = self.kept_bytes, 0.0, 0.0
        for name, end in self._end.items():
            if end == len(self._nodes) and self._gradient_bytes[name]:
                run.start(name, foreign=not ends)
        # What other stages have sent is held to the end, and so are the outputs.
        fixed = self.taken_bytes + (0.0 if ends else self.given_gradients + self.unkept_outputs)
        peak = fixed + kept + run.bytes
        for i in range(len(self._nodes) - 1, -1, -1):
            node = self._nodes[i]
            waits = divided and node.late_peak_bytes > 0
            allocates = node.halved_peak_bytes if waits else node.backward_peak_bytes
            # Gradients of several outputs count as allocated by the node that made these.
            allocates = max(allocates - run.find_pending(node.name), 0.0)
            small += node.handed_bytes
            peak = max(peak, fixed + kept + run.bytes + small + waiting + allocates)
            more = run.hand_back(node)
            more += self._ties.more.get(i, 0.0)
            run.bytes += self._ties.change.get(i, 0.0)
            peak = max(peak, fixed + kept + run.bytes + more + small + waiting)
            waiting += run.leave(node, waits=waits)
            if not divided:
                kept -= node.kept_bytes
                if not ends:
                    # Handed on, and so held by the stage itself.
                    fixed += min(self._kept_outputs.get(node.name, 0.0), node.kept_bytes)
        gradients = run.find_left()
        self._waiting = waiting + sum(run.left_behind.values()) + max(run.bytes - run.find_left(own=True), 0.0)
        return peak, gradients


class _Backward:
    """The gradients of values that are there while a backward runs; `bytes` are in memory of its own."""

    def __init__(self, costs: Costs, sizes: Mapping[str, float]) -> None:
        self.bytes = 0.0
        self._costs = costs
        self._sizes = sizes
        self._found: dict[str, _Gradient] = {}
        # Foreign memory that weights wait with, and have for themselves when the first half is over; by its object.
        self.left_behind: dict[_Memory, float] = {}
        # The gradients of several outputs of a node, which wait for it.
        self._pending: dict[str, list[_Memory]] = {}

    def start(self, name: str, *, foreign: bool) -> None:
        """Let the gradient of a value arrive from behind the stage; the memory of a `foreign` one counts already."""
        size = self._sizes[name]
        self._found[name] = _Gradient(_Memory(size, 1, foreign), owned=False)
        self.bytes += 0.0 if foreign else size

    def find_pending(self, name: str) -> float:
        """Return the bytes of gradients that wait for a node with several outputs."""
        return sum(memory.size for memory in self._pending.get(name, ()))

    def find_left(self, *, own: bool = False) -> float:
        """Return the bytes of all gradients that are there, each memory once; of its `own` memory alone if asked."""
        left = {id(g.memory): g.memory for g in self._found.values()}
        return sum(m.size for m in left.values() if not (own and m.foreign))

    def hand_back(self, node: NodeCost) -> float:
        """Let the gradients that a node's backward returns arrive; return what is there for a moment besides."""
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
        """Add a gradient to what has arrived for a value; return what the sum takes for a moment besides."""
        before = self._found.get(name)
        if before is None:
            self._found[name] = _Gradient(memory, owned)
            return 0.0
        # torch's engine adds to a gradient that nothing else shares memory with, and else makes a third tensor.
        if before.owned:
            self._release(memory)
            return 0.0
        made = _Memory(self._sizes[name])
        self._found[name] = _Gradient(made, owned=True)
        self.bytes += made.size
        freed = self._release(memory) + self._release(before.memory)
        return freed

    def leave(self, node: NodeCost, *, waits: bool) -> float:
        """Let a node's own gradient go, unless its weights wait with it; return what waits besides what is counted."""
        for memory in self._pending.pop(node.name, ()):
            self._release(memory)
        arrived = self._found.pop(node.name, None)
        if arrived is None:
            return node.waiting_bytes if waits else 0.0
        if waits:
            # It stays in memory, whose bytes go on to count. Others let go of theirs when the first half is over.
            if arrived.memory.foreign:
                self.left_behind[arrived.memory] = arrived.memory.size
            return max(node.waiting_bytes - arrived.memory.size, 0.0)
        if is_part_of_several(node):
            self._pending.setdefault(node.inputs[0], []).append(arrived.memory)
            return 0.0
        self._release(arrived.memory)
        return 0.0

    def _release(self, memory: _Memory) -> float:
        """Let one gradient go; return how many bytes that frees."""
        memory.holders -= 1
        freed = 0.0 if memory.holders or memory.foreign else memory.size
        self.bytes -= freed
        return freed


class _Ties(NamedTuple):
    """Gradients of parameters that several nodes of a stage use, by the place of a node whose backward has just run.

    change: what is there from then on. more: what is there for a moment, where two gradients make a third one.
    """

    change: Mapping[int, float]
    more: Mapping[int, float]


def _find_ties(costs: Costs, position: Mapping[str, int]) -> _Ties:
    """Return what gradients of tied parameters take: autograd adds up those of all users before they go to the sum."""
    change: dict[int, float] = {}
    more: dict[int, float] = {}
    for tie in costs.tied:
        size, places = tie.parameter_bytes, sorted(position[name] for name in tie.nodes if name in position)
        if len(places) > 1:
            first, *others, last = places
            change[last] = change.get(last, 0.0) + size
            change[first] = change.get(first, 0.0) - size
            for place in (first, *others):
                more[place] = more.get(place, 0.0) + size
    return _Ties(change, more)
