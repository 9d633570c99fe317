"""Run a compiled program: microbatches go through its stages, with one worker for each device.

`Engine` turns a batch into a `Job`, and the workers of `backends/` run the job's actions. Each action calls `stage/`: a
forward or a backward of one stage on one microbatch.
"""
