"""The plan with the shortest step: stages, replicas, devices and order of work chosen together, with a lower bound.

The bottleneck is the pace of a pipeline that runs forever. Users run steps: a batch of m microbatches, with fill and
drain, gradients summed once, and the optimizer after that. `prices` sums up the times of all stages, `bound` proves how
short a step can be, `search` finds stages, and `step` makes a plan of the best of them.
"""
