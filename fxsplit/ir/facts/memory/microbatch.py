"""Follow a stage through one microbatch, node by node, and find the most memory that it holds in each action.

The forward runs the nodes in the order of the graph, and the backward in reverse order, like torch's engine. The
allocations of each node were measured, and the lives of tensors between nodes follow from who reads what:

                            f1   f2   f3   loss   b3   b2   b1
    kept by f1              |------------------------------>|
    kept by f2                   |-------------------->|
    value 1, kept by none   |--->|
    gradient of value 2                           |--->|

- activations that autograd keeps for a node live from its forward to its backward. If only later nodes keep them, they
  live to the backward of the first of these nodes
- a value that no node keeps lives until the last node that reads it, or a view of it, has run. Views take no memory
- the gradient of a value lives from the backward of the last node that reads the value to the backward of the node
  that made the value. A node may return its incoming gradient, or parts of it; both are then one piece of memory
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.costs.edges import list_crossed
from fxsplit.ir.facts.costs.loss import NO_LOSS
from fxsplit.ir.facts.memory.gradients import BackwardGradients, find_ties, runs_nothing

TOGETHER_BYTES = 1 << 16
"""Delayed gradients of weights are added to their sums in groups of up to this number of bytes."""


@dataclass(frozen=True, kw_only=True)
class MicrobatchMemory:
    """The memory of a stage for one microbatch, in bytes, without weights, sums of gradients and other microbatches.

    - `resting_bytes`: between its forward and its backward
    - `halfway_bytes`: between the two halves of a divided backward, whose second half computes the gradients of weights
    - `forward_bytes`, `whole_bytes`, `early_bytes`, `late_bytes`: the most while a forward, a whole backward, or the
      first or the second half of a divided backward runs
    - `first_bytes`: like `whole_bytes`, for the first backward of a step. It includes the sums of gradients, which this
      backward makes
    - `sent_bytes`, `sent_gradient_bytes`: values, and gradients, that were made for other stages and wait to be taken,
      as far as nothing else holds them here
    """

    resting_bytes: float = 0.0
    halfway_bytes: float = 0.0
    forward_bytes: float = 0.0
    whole_bytes: float = 0.0
    first_bytes: float = 0.0
    early_bytes: float = 0.0
    late_bytes: float = 0.0
    sent_bytes: float = 0.0
    sent_gradient_bytes: float = 0.0


class Crossings(NamedTuple):
    """The names of the values that a stage takes from the stages before it, and gives to later stages."""

    taken: Sequence[str]
    given: Sequence[str]


def list_crossings(costs: Costs, stage_of: Mapping[str, int], count: int) -> list[Crossings]:
    """Return the values that cross the two boundaries of each of `count` stages.

    A value that a later stage reads crosses every boundary on the way, as under the cost model `forwarded`.
    """
    # Boundary b lies before stage b.
    crossing: list[list[str]] = [[] for _ in range(count + 1)]
    for name, _, _, readers, returned in costs.values:
        for boundary in list_crossed(stage_of, name, readers, count, returned=returned):
            crossing[boundary].append(name)
    return [Crossings(*both) for both in pairwise(crossing)]


def follow_stage(
    costs: Costs, names: Sequence[str], crossings: Crossings, *, recompute: bool, last: bool
) -> MicrobatchMemory:
    """Return the memory that a stage of the nodes `names`, in the order of the graph, holds in each action.

    `last`: the loss is computed after the stage. Every node's allocations must be known (see `Costs.weighed`).
    """
    stage = _Stage(costs, names, crossings)
    kept, light = stage.run_forward(keeps=True), stage.run_forward(keeps=False)
    if costs.inference:
        # At rest are the values between stages, of a microbatch that has arrived or has been handed on.
        at_rest = stage.taken_bytes + stage.unkept_outputs
        sent = stage.made_bytes + stage.passed_bytes
        return MicrobatchMemory(resting_bytes=at_rest, forward_bytes=min(kept, light), sent_bytes=sent)
    loss, taken = costs.find_loss(stage.given_bytes) if last else NO_LOSS, stage.taken_bytes
    # The loss keeps the outputs that nothing else keeps. Outputs that nothing keeps are freed after it.
    loss_keeps = loss.kept_bytes + stage.unkept_outputs * loss.keeps_outputs
    # A stage that recomputes holds the outputs of the model as any other stage holds the values that it gives.
    ends = last and not recompute
    backward, gradients = stage.run_backward(ends=ends, divided=False)
    first, _ = stage.run_backward(ends=ends, divided=False, sums=True)
    early, _ = stage.run_backward(ends=ends, divided=True)
    # The memory kept by the loss is freed with all the rest.
    early += loss_keeps * ends
    halfway = stage.find_halfway(ends=ends) + loss_keeps * ends
    late = halfway + stage.find_late()
    if not stage.waits:
        # Nothing is left for later, so the first half is the whole backward, and frees all.
        early, late = backward, taken + (0.0 if ends else stage.unkept_outputs + stage.kept_outputs)
        halfway = late
    resting = taken + stage.kept_bytes + (loss_keeps if last else stage.unkept_outputs)
    forward = max(kept, taken + stage.kept_bytes + stage.unkept_outputs + loss.forward_peak_bytes)
    losing = taken + stage.kept_bytes + loss_keeps + loss.backward_peak_bytes
    sent = 0.0
    if recompute:
        # The outputs of the model are the start of the loss's own graph.
        outputs = stage.own_outputs * last
        forward = max(min(light, kept), taken + outputs + loss.forward_peak_bytes)
        resting = taken + outputs + loss.kept_bytes
        # The gradients of the outputs exist while the forward runs once more.
        losing = max(resting + loss.backward_peak_bytes, kept + stage.given_gradients)
        sent = 0.0 if last else stage.made_bytes
        # The outputs that the loss was computed from live as long as the gradients of the weights wait.
        early += outputs
    # A stage that runs a forward again keeps the old contents of its buffers until that is over.
    again = stage.written_bytes * recompute
    return MicrobatchMemory(
        resting_bytes=resting + again,
        halfway_bytes=halfway + again,
        forward_bytes=forward + again,
        whole_bytes=max(backward, losing) + again,
        first_bytes=max(first, losing) + again,
        early_bytes=max(early, losing) + again,
        late_bytes=late + again,
        sent_bytes=sent,
        sent_gradient_bytes=gradients,
    )


class _Stage:
    """The nodes of a stage, the values that it takes from other stages, and the values that it gives to them.

    Its methods simulate a forward or a backward, and return the memory that the stage holds meanwhile.
    """

    def __init__(self, costs: Costs, names: Sequence[str], crossings: Crossings) -> None:
        self._nodes = [costs.by_name[name] for name in names]
        self._costs = costs
        position = {name: i for i, name in enumerate(names)}
        values = [costs.value_of[name] for name in (*names, *(n for n in crossings.taken))]
        given = set(crossings.given)
        # Value -> the position of the last node that reads it. For a value that other stages read: after all nodes.
        self._end = {
            v[0]: len(names) if v[0] in given else max([position[r] for r in v[3] if r in position], default=-1)
            for v in values
        }
        self._gradient_bytes = {v[0]: v[2] for v in values}
        size_of = {v[0]: v[1] for v in values}
        # The given values that this stage makes. It only hands on the rest.
        self._made = [name for name in crossings.given if name in position]
        self.taken_bytes = sum(size_of[name] for name in crossings.taken)
        self.passed_bytes = sum(size_of[name] for name in crossings.given if name not in position)
        self.made_bytes = sum(max(size_of[name], costs.by_name[name].storage_bytes) for name in self._made)
        # The owners of the memory of these values. A view of a taken value counts with that value.
        owners = [costs.by_name[name].lies_in or name for name in self._made]
        held = [costs.by_name[name] for name in dict.fromkeys(owners) if name in position]
        self.given_bytes = sum(size_of[name] for name in crossings.given)
        self.given_gradients = sum(self._gradient_bytes[name] for name in crossings.given)
        self.kept_bytes = float(sum(n.kept_bytes for n in self._nodes))
        self.unkept_outputs = sum(owner.unkept_bytes for owner in held)
        self._kept_outputs = {
            owner.name: min(max(owner.storage_bytes - owner.unkept_bytes, 0.0), owner.kept_bytes) for owner in held
        }
        self.own_outputs = sum(max(owner.storage_bytes, owner.unkept_bytes) for owner in held)
        self.kept_outputs = sum(self._kept_outputs.values())
        # Value -> the position of the last node that needs its memory, which may read only a view of the value.
        self._memory_end = dict(self._end)
        for node in self._nodes:
            if node.lies_in in position:
                self._memory_end[node.lies_in] = max(self._memory_end[node.lies_in], self._end[node.name])
        self.written_bytes = sum(n.written_bytes for n in self._nodes)
        self.waits = any(n.late_peak_bytes > 0 for n in self._nodes)
        # Filled by a backward: the memory held between its halves, without gradients for other stages.
        self._waiting = 0.0
        self._ties = find_ties(costs, position)
        self._position = position

    def find_halfway(self, *, ends: bool) -> float:
        """Return the bytes that the stage holds between the halves of the last backward that `run_backward` ran."""
        return self.taken_bytes + self.kept_bytes + (0.0 if ends else self.unkept_outputs) + self._waiting

    def find_late(self) -> float:
        """Return the bytes that the second half of a backward allocates: a node's, and a group of small gradients."""
        waiting = [n for n in self._nodes if n.late_peak_bytes > 0]
        together = min(sum(n.parameter_bytes or n.late_peak_bytes for n in waiting), TOGETHER_BYTES)
        return max((n.late_peak_bytes for n in waiting), default=0.0) + together

    def run_forward(self, *, keeps: bool) -> float:
        """Simulate a forward.

        Return the most bytes that the stage holds meanwhile; `keeps`: with the activations it keeps.
        """
        peak = now = self.taken_bytes
        ends: dict[int, float] = {}
        for i, node in enumerate(self._nodes):
            kept = node.kept_bytes if keeps else 0.0
            size = node.unkept_bytes if keeps else max(node.storage_bytes, node.unkept_bytes)
            if node.lies_in:
                size = 0.0
            peak = max(peak, now + max(node.forward_peak_bytes or 0.0, kept))
            now += kept
            # A value that nobody reads is freed at once.
            end = self._memory_end[node.name]
            if end > i:
                now += size
                ends[end] = ends.get(end, 0.0) + size
            now -= ends.pop(i, 0.0)
        return max(peak, now)

    def run_backward(self, *, ends: bool, divided: bool, sums: bool = False) -> tuple[float, float]:
        """Simulate a backward.

        Return the most bytes that the stage holds meanwhile, and the bytes of its inputs' gradients.
        - `ends`: the stage is the last, so the loss makes the gradients of its outputs, and autograd owns their memory
        - `divided`: run only the first half, which delays the gradients of weights and frees no activations
        - `sums`: also count the sums of gradients, as in the first backward of a step, which makes them
        """
        run = BackwardGradients(self._costs, self._gradient_bytes)
        kept, small, waiting, summed = self.kept_bytes, 0.0, 0.0, 0.0
        freed, made = self._list_freed(), self._list_summed() if sums else {}
        for name, end in self._end.items():
            if end == len(self._nodes) and self._gradient_bytes[name]:
                run.start(name, foreign=not ends)
        # Values from other stages are held to the end, and so are the outputs.
        fixed = self.taken_bytes + (0.0 if ends else self.given_gradients + self.unkept_outputs)
        peak = fixed + kept + run.bytes
        for i in range(len(self._nodes) - 1, -1, -1):
            node = self._nodes[i]
            waits = divided and node.late_peak_bytes > 0
            allocates = node.halved_peak_bytes if waits else node.backward_peak_bytes
            # Gradients of several outputs are part of the allocation of the node that made these outputs.
            allocates = max(allocates - run.find_pending(node.name), 0.0)
            peak = max(peak, fixed + kept + run.bytes + small + waiting + summed + allocates)
            small += node.handed_bytes
            summed += made.get(i, 0.0)
            more = run.hand_back(node)
            more += self._ties.more.get(i, 0.0)
            run.bytes += self._ties.change.get(i, 0.0)
            peak = max(peak, fixed + kept + run.bytes + more + small + waiting + summed)
            waiting += run.leave(node, waits=waits)
            if not divided:
                for bytes_, held in freed[i]:
                    kept -= bytes_
                    # The stage has handed this value on, so it still holds the memory itself.
                    fixed += 0.0 if ends else held
        gradients = run.find_left()
        self._waiting = waiting + sum(run.left_behind.values()) + max(run.bytes - run.find_left(own=True), 0.0)
        return peak, gradients

    def _list_freed(self) -> Mapping[int, list[tuple[float, float]]]:
        """Return, by position of a node, what its backward frees: kept bytes, and the bytes of outputs among them."""
        found: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for i, node in enumerate(self._nodes):
            held = self._kept_outputs.get(node.name, 0.0)
            # The part that a later node of the stage keeps is freed with that node.
            later = node.kept_for_bytes if node.kept_for in self._position else 0.0
            found[self._position.get(node.kept_for, i)].append((later, min(held, later)))
            found[i].append((node.kept_bytes - later, max(held - later, 0.0)))
        return found

    def _list_summed(self) -> Mapping[int, float]:
        """Return, by position of a node, the bytes of new sums of gradients after the backward of this node.

        A small gradient becomes its sum itself at the end of the stage's backward. Its memory counts anyway, and not
        here.
        """
        found: dict[int, float] = defaultdict(float)
        for i, node in enumerate(self._nodes):
            place = i
            # A fetched parameter gets its gradient from the nodes that read it.
            if runs_nothing(node):
                readers = (r for r in self._costs.value_of[node.name][3] if r in self._position)
                place = max((self._position[r] for r in readers), default=i)
            found[place] += max(node.parameter_bytes - node.handed_bytes, 0.0)
        for place, size in self._ties.again.items():
            found[place] -= size
        return found
