"""The planner: from a profile to the best chain of stages, with a proof. It needs neither torch nor a model.

The words, by a graph of four nodes in which a is read by b and c, and both are read by d:

    a -> b -> d
    a -> c -> d

- An *ideal* is a set of nodes that holds all that its members read: {}, {a}, {a, b}, {a, c}, {a, b, c}, {a, b, c, d}.
  A pipeline can be cut behind an ideal, since nothing inside waits for anything outside.
- An *antichain* is a set of nodes of which none leads to another, such as {b, c}. The last nodes of an ideal are one.
  The *augmented antichain* of an ideal adds the members that something outside still reads. It names the ideal:
  {a, b} is the name of {a, b}, as c still reads a, and {b, c} is the name of {a, b, c}.
- A *state* is an ideal with the sums that a cut there needs: the time and memory of its nodes, the bytes that cross.
- A *stage* is what lies between two states: from {a} to {a, b, c} it is {b, c}. A plan is a chain of states from {} to
  the whole graph, with devices for each stage. The best plan has the fastest slowest stage.

In the order of a search: `contraction` joins nodes that need no stage of their own, `lattice` enumerates the ideals,
`sequence` makes them states, `moves` lists the devices for a stage, `prices` says what both take, `problem` poses the
problem, `search` finds the best chain, `solve` makes a plan of it, and `planner` puts these together.
"""

from fxsplit.planner.clock import Clock
from fxsplit.planner.kernels import prefer_compiled
from fxsplit.planner.lattice.contraction import contract_costless_nodes
from fxsplit.planner.lattice.lattice import antichains, enumerate_ideals
from fxsplit.planner.lattice.sequence import sequence_states
from fxsplit.planner.solve import Options, Task, bound_by_work, partition, pose_problems

__all__ = [
    "Clock",
    "Options",
    "Task",
    "antichains",
    "enumerate_ideals",
    "bound_by_work",
    "contract_costless_nodes",
    "partition",
    "pose_problems",
    "prefer_compiled",
    "sequence_states",
]
