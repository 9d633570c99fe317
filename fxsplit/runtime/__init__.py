"""Run a compiled program: microbatches go through its stages, with one worker for each device.

`Engine` takes a batch and makes a `Job` of it, the workers of `backends/` do the job's actions, and each action is a
call of `stage/`: a forward or a backward of one stage on one microbatch.
"""
