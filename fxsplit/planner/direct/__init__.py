"""The cost model `direct`, by itself: each stage sends what others read straight to them.

It is the model of the DP program of "Efficient Algorithms for Device Placement of DNN Graph Operators" (Tarnawski et
al., NeurIPS 2020), kept to compare plans with that paper. fxsplit's runtime forwards values from stage to stage.
"""

from fxsplit.planner.direct.problem import pose_direct

__all__ = ["pose_direct"]
