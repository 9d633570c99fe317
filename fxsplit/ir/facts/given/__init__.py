"""The facts given to a plan: the machine, the schedule with its microbatches, and pinned modules."""
