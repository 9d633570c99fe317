"""Facts of the capture: the call that a graph is for, what it reads and writes, and what its outputs mean."""
