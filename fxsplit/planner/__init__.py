"""The planner: from a profile to the best chain of stages, with a proof. It needs neither torch nor a model.

The method, with augmented antichains and a sequence of states, is that of "Task segmentation and parallel optimization
of deep neural networks based on feature perception". The terms, by a graph of four nodes: b and c read a, and d reads
both.

    graph           its ideals (below), each named by its augmented antichain (above)

    a -> b -> d     {}  ---->  {a}  -+-> {a, b} -+->  {b, c}  ---->  {d}
    a -> c -> d                      +-> {a, c} -+
                    (empty)     a        a b, a c      a b c         a b c d

- An *ideal* is a set of nodes that contains every node its members read. A pipeline can be cut after an ideal, because
  nothing inside it waits for a node outside.
- An *antichain* is a set of nodes without a path between any two of them, such as {b, c}. The last nodes of an ideal
  form an antichain. The *augmented antichain* of an ideal adds the members that a node outside still reads, and
  identifies the ideal: {a, b} names the ideal a b, since c still reads a.
- A *block* is a set of nodes that every plan keeps in one stage: usually a single node, or nodes that share a weight.
  The ideals are those of the graph of blocks. Nodes a to d above are blocks of one node each.
- A *state* is an ideal with the sums that the price of a cut needs: time and memory of its nodes, bytes that cross.
- A *stage* is the difference of two states: from {a} to {b, c} it contains b and c. A *move* gives devices to a stage,
  and a *configuration* is the set of devices that have been given so far.
- A *plan* is a chain of states from {} to the whole graph, with a move for each stage. The *load* of a stage is the
  time for which one microbatch keeps it busy. The best plan has the smallest *bottleneck*, the load of its slowest
  stage.

The order of a search: `contraction` joins nodes that need no stage of their own, `lattice` enumerates the ideals,
`sequence` sums them up as states, `moves` lists the devices of a stage, `prices` computes the cost of states and moves,
`problem` poses the problem, `search` finds the best chain, `solve` turns it into a plan, and `planner` calls them all.
"""

from fxsplit.planner.clock import SearchClock
from fxsplit.planner.kernels import prefer_compiled
from fxsplit.planner.lattice.contraction import contract_costless_nodes
from fxsplit.planner.lattice.lattice import antichains, enumerate_ideals
from fxsplit.planner.lattice.sequence import sequence_states
from fxsplit.planner.solve import Options, Task, bound_by_work, partition, pose_problems

__all__ = [
    "SearchClock",
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
