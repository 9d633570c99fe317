"""Ranks: processes of torch.distributed that run one pipeline together, each the stages of one device.

Every rank has the whole program, and runs its own row of each schedule in the thread that calls the pipeline. The only
room that knows torch.distributed, beside checkpoints in `fxsplit/api/`.
"""
