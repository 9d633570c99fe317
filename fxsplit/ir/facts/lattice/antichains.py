"""Antichains: all sets of blocks after which a pipeline can be cut, each named by its augmented antichain.

An *ideal* is a set of blocks that contains all inputs of its members, so a pipeline can be cut after it. The ideals
form a lattice. The *augmented antichain* of an ideal contains the members that a block outside reads, and the members
that no block inside reads. See planner/__init__.py for an example. The pass `augment` makes this fact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np

from fxsplit.errors import BrokenFact
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.lattice.arrays import Floats, Ints, ReadOnlyArrays
from fxsplit.ir.facts.lattice.blocks import Blocks
from fxsplit.ir.graph import IR, Fact

SHOWN = 40
"""How many antichains a dump lists from the beginning, and how many from the end."""
SAMPLED = 50
"""How many ideals `verify` checks against the definition."""


@dataclass(frozen=True, eq=False)
class Levels(ReadOnlyArrays):
    """Lower bounds on the bytes that any cut sends, by the work before the cut. All arrays are float64 [levels].

    Level i says: an ideal with work between `low[i]` and `high[i]` ms has at least `least_bytes[i]` live bytes, forward
    and backward together.
    """

    low: Floats
    high: Floats
    least_bytes: Floats


@dataclass(frozen=True, eq=False)
class Slack(ReadOnlyArrays):
    """Figures that bound how much slower the best plan becomes by joining light nodes to the nodes that they follow.

    The light nodes that are joined to a node are its *tail*. `path` (int32 [tails]) gives the number of the path of the
    graph that each tail lies on: no cut separates two tails of one path. The other arrays are float64 [tails]: what a
    stage has more if it has the tail too. `weighed_ms_per_byte` is the price of a byte of parameters that was assumed
    when the light nodes were chosen.
    """

    path: Ints
    forward_ms: Floats
    backward_ms: Floats
    host_ms: Floats
    parameter_bytes: Floats
    forward_launch_ms: Floats
    backward_launch_ms: Floats
    weighed_ms_per_byte: float

    def bound_ms(self, *, twice: bool, hosts: bool, speed: float, reduce_ms_per_byte: float) -> float:
        """Return an upper bound on the slowdown of the slowest stage of the best plan, in milliseconds.

        - `twice`: a stage may run its forward twice
        - `hosts`: some device is a host
        - `speed`: the speed of the slowest device
        - `reduce_ms_per_byte`: the longest time in which replicas of a stage sum a byte of gradients
        """
        own = self.forward_ms * (1 + twice) + self.backward_ms
        each = (np.maximum(own, self.host_ms) if hosts else own) / speed + self.parameter_bytes * reduce_ms_per_byte
        # The load is the larger of two sums, so it grows by no more than the sum that grows more.
        each = np.maximum(each, self.forward_launch_ms * (1 + twice) + self.backward_launch_ms)
        # A cut separates at most one tail of each path, so the largest of each path counts.
        largest = np.zeros(int(self.path.max(initial=-1)) + 1)
        np.maximum.at(largest, self.path, each)
        return float(largest.sum())


@dataclass(frozen=True, eq=False)
class Antichains(ReadOnlyArrays, Fact):
    """Every ideal (downset) of the blocks, numbered so that a subset has the smaller number.

    - `parent` and `last` (int32 [ideals]) build each ideal: it is the ideal `parent` and the block `last`. Ideal 0 is
      empty, and the last ideal is full.
    - `pointer`, `node`, `child` are the edges in CSR form: from ideal I to ideal `child`, which also contains block
      `node`
    - `live_bytes` (float64 [ideals]) sums the values that are made inside, or given to the model, and read outside,
      each once; `live_gradient_bytes` sums their gradients, which come back; `sent_bytes` sums the bytes of both on a
      link, which are fewer if they are compressed
    - `complete` is False if there were too many ideals. The ideals are then only the prefixes of one topological order,
      and `levels` bounds all other ideals
    - `enumerated` is True if the planner itself has enumerated the ideals. A plan over any other ideals is not called
      optimal
    - `slack` bounds the slowdown of the best plan; None if no light nodes were joined

    `joined` are nodes that the costs would allow to cut apart, but that share a block because such a cut is seldom
    useful. If this loses a plan after all, `partition` enumerates again without joining, up to `max_states` ideals. A
    pass that replaces the ideals by its own, and wants no others, leaves `joined` empty.
    """

    blocks: Blocks
    parent: Ints
    last: Ints
    pointer: Ints
    node: Ints
    child: Ints
    live_bytes: Floats
    live_gradient_bytes: Floats
    sent_bytes: Floats
    complete: bool
    slack: Slack | None = None
    levels: Levels | None = None
    joined: frozenset[str] = frozenset()
    max_states: int = 1_000_000
    enumerated: bool = field(default=False, init=False)
    _verified: Costs | None = field(default=None, init=False, repr=False)

    derives_from: ClassVar[tuple[type, ...]] = (Costs, Machine)
    made_by: ClassVar[str] = "augment"

    def __len__(self) -> int:
        return int(self.parent.size)

    def ideal(self, number: int) -> list[int]:
        """Return the blocks of an ideal, ascending."""
        found = []
        while number > 0:
            found.append(int(self.last[number]))
            number = int(self.parent[number])
        return found[::-1]

    def names(self, number: int) -> list[str]:
        """Return the nodes of an ideal."""
        return [name for block in self.ideal(number) for name in self.blocks.members[block]]

    def antichain(self, number: int) -> list[int]:
        """Return the augmented antichain of an ideal: its maximal blocks and the blocks that a block outside reads."""
        # A block is maximal if no block inside reads it, and live if a block outside does.
        inside = set(self.ideal(number))
        after = self.blocks.after
        return [b for b in sorted(inside) if not inside.issuperset(after[b]) or inside.isdisjoint(after[b])]

    def verify(self, ir: IR) -> None:
        """Raise BrokenFact unless the ideals form a lattice: sizes add up, and each edge adds its block to an ideal."""
        # A pass may have rewritten the graph and kept the lattice of the old one.
        if set(self.blocks.home) != set(ir[Costs].by_name):
            raise BrokenFact("the antichains describe other nodes than the costs")
        if len(self) == 0 or self._sizes[-1] != len(self.blocks):
            raise BrokenFact(f"the last ideal has {self._sizes[-1]} of {len(self.blocks)} blocks")
        # An edge that skips or repeats a block would let the search find stages that do not exist.
        start = np.repeat(np.arange(len(self)), np.diff(self.pointer))
        if not (np.all(self.child > start) and np.all(self._sizes[self.child] == self._sizes[start] + 1)):
            raise BrokenFact("an edge of the lattice does not lead to an ideal one block larger")
        if np.any(np.diff(self.pointer)[:-1] == 0):
            raise BrokenFact("an ideal other than the full one has no larger neighbour")
        self._verify_sample(ir[Costs])

    def _verify_sample(self, costs: Costs) -> None:
        """Raise BrokenFact unless live bytes and neighbours of up to SAMPLED ideals are right by their definition."""
        at = np.unique(np.linspace(0, len(self) - 1, SAMPLED).astype(int))
        for i in [] if self._verified is costs else at:
            inside = set(self.ideal(int(i)))
            names = {name for block in inside for name in self.blocks.members[block]}
            said = self.live_bytes[i], self.live_gradient_bytes[i], self.sent_bytes[i]
            true = costs.sum_live(names)
            if not np.allclose(said, true, rtol=1e-9):
                raise BrokenFact(
                    f"ideal {i} is said to have {said[0]:g} live bytes forward and {said[1]:g} back, and has "
                    f"{true[0]:g} and {true[1]:g}; they are said to be sent as {said[2]:g}, and are as {true[2]:g}"
                )
            if not self.complete:
                continue
            larger = sum(b not in inside and inside.issuperset(self.blocks.before[b]) for b in range(len(self.blocks)))
            if larger != self.pointer[i + 1] - self.pointer[i]:
                raise BrokenFact(f"ideal {i} has {larger} neighbours that are one block larger, and not all are listed")
        # Facts do not change, so once is enough.
        object.__setattr__(self, "_verified", costs)

    @cached_property
    def _sizes(self) -> Ints:
        """The number of blocks in each ideal."""
        sizes = np.zeros(len(self), np.int32)
        for i in range(1, len(self)):
            # The parent is one block smaller, and has a smaller number.
            sizes[i] = sizes[self.parent[i]] + 1
        return sizes

    def __str__(self) -> str:
        """Return the number of states, then the antichain and live bytes of the first and the last states."""
        # A dump of a million states would be useless, so it shows both ends.
        kind = "every ideal" if self.complete else "prefixes of one topological order only (too many ideals)"
        lines = [f"{len(self)} states of {len(self.blocks)} blocks: {kind}"]
        lines += [f"{len(self.joined)} nodes are joined to neighbours"] if self.joined else []
        if self.slack is not None:
            lost = self.slack.bound_ms(twice=False, hosts=False, speed=1.0, reduce_ms_per_byte=0.0)
            lines.append(f"light nodes joined, at {lost:.6g} ms at most")
        return "\n".join([*lines, *list_ends(len(self), self._describe)])

    def _describe(self, number: int) -> str:
        """Return one line on an ideal: its live bytes, and a node of each block of its antichain."""
        names = " ".join(self.blocks.members[b][-1] for b in self.antichain(number))
        return f"{number:>6} live {self.live_bytes[number]:>12.0f} B  {{{names}}}"


def list_ends(count: int, describe: Callable[[int], str]) -> list[str]:
    """Return the lines of the first and last SHOWN of `count` items, and the number of items between them."""
    if count <= 2 * SHOWN:
        return [describe(i) for i in range(count)]
    first, last = map(describe, range(SHOWN)), map(describe, range(count - SHOWN, count))
    return [*first, f"... {count - 2 * SHOWN} more", *last]
