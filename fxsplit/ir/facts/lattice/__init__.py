"""The lattice: blocks of nodes, their antichains, and the sequence of states that the planner searches."""
