"""The planner: from a profile to the best chain of stages, with its proof; needs neither torch nor a model."""

from fxsplit.planner.clock import Clock
from fxsplit.planner.contraction import merged
from fxsplit.planner.lattice import antichains, antichains_within
from fxsplit.planner.search import beats
from fxsplit.planner.sequence import sequence
from fxsplit.planner.solve import Options, least_load, partition, problems

__all__ = [
    "Clock",
    "Options",
    "antichains",
    "antichains_within",
    "beats",
    "least_load",
    "merged",
    "partition",
    "problems",
    "sequence",
]
