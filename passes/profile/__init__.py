"""profile: measure the time and memory of every node; learns Costs."""
