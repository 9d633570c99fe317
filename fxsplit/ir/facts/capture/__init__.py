"""Facts from the capture: the call that a graph is for, the state it reads and writes, and the kinds of its outputs."""
