"""augment: enumerate the ideals of the graph, which are the places where it can be cut; learns Antichains.

An *ideal* is a set of nodes that contains every node that its nodes read, so a stage may end after it:

    graph:  a -> b -> d      ideals:  {}  {a}  {a b}  {a c}  {a b c}  {a b c d}
            a -> c -> d

The first pass of planning: `profile` measured the costs, `order` then sums them over the ideals, and `partition` cuts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxsplit.errors import ChainError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.pins import Pins
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.graph import IR
from fxsplit.planner.lattice.lattice import enumerate_ideals


@dataclass(frozen=True)
class Augment:
    """Enumerate every ideal, at most `max_states`.

    - If the devices are interchangeable, nodes without cost first join a neighbour, so that there are fewer ideals. If
      this may lose the best plan, `partition` enumerates again without joining.
    - `free` says that partition{free=true} follows, so that stages take the devices in any order.
    - If there would be too many ideals, light nodes join the nodes that they follow, or only the ideals of one
      topological order are enumerated. The plan is then not proven optimal. It has a gap to a lower bound instead.
    """

    max_states: int = 1_000_000
    free: bool = False

    name: ClassVar[str] = "augment"
    ignores_mode: ClassVar[bool] = True
    needs: ClassVar[tuple[type, ...]] = (Costs,)
    learns: ClassVar[tuple[type, ...]] = (Antichains,)
    ignores_graph: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_states < 1:
            raise ChainError(f"augment{{max_states={self.max_states}}}: give a positive number")

    def __call__(self, ir: IR) -> IR:
        """Learn Antichains from Costs."""
        costs, machine, pins = ir[Costs], ir.get(Machine), ir.get(Pins)
        pinned = pins.nodes(costs, machine) if pins else {}
        # Joining may empty a stage and so move later stages up one device: devices must be interchangeable.
        join = machine is not None and (self.free or (machine.uniform and not pinned))
        found = enumerate_ideals(costs, machine, pinned, self.max_states, join=join)
        sizes = {"states": len(found), "edges": len(found.child), "blocks": len(found.blocks)}
        return ir.learn(found).note(**sizes, nodes=len(costs.nodes), joined=len(found.joined))
