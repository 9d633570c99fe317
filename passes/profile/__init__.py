"""profile: measure the time and memory of every node, for the planner. This pass learns Costs."""
