"""Ranks: processes of torch.distributed that run one pipeline together. Each rank runs the stages of one device.

Every rank has the whole program. It runs its own row of each schedule, in the thread that calls the pipeline. Only this
room and the checkpoints in `fxsplit/api/` know torch.distributed.
"""
