"""The cost model `direct`: each stage sends a tensor straight to every stage that reads it.

It is the model of the DP in "Efficient Algorithms for Device Placement of DNN Graph Operators" (Tarnawski et al.,
NeurIPS 2020), for comparison with that paper. fxsplit's runtime forwards values from stage to stage instead.
"""

from fxsplit.planner.direct.problem import pose_direct

__all__ = ["pose_direct"]
