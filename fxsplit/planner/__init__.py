"""The planner: from a profile to the best chain of stages, with its proof; needs neither torch nor a model."""

from fxsplit.planner.clock import Clock
from fxsplit.planner.contraction import contract_costless_nodes
from fxsplit.planner.lattice import antichains, enumerate_within
from fxsplit.planner.search import beats
from fxsplit.planner.sequence import sequence_states
from fxsplit.planner.solve import Options, bound_by_work, partition, pose_problems

__all__ = [
    "Clock",
    "Options",
    "antichains",
    "enumerate_within",
    "beats",
    "bound_by_work",
    "contract_costless_nodes",
    "partition",
    "pose_problems",
    "sequence_states",
]
