"""The planner: from a profile to the best chain of stages, with its proof; needs neither torch nor a model."""

from fxsplit.planner.contraction import merged
from fxsplit.planner.lattice import antichains
from fxsplit.planner.sequence import sequence
from fxsplit.planner.solve import Options, partition

__all__ = ["Options", "antichains", "merged", "partition", "sequence"]
