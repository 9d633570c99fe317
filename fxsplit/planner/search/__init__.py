"""The search for the chain of states with the smallest bottleneck, and bounds that no chain beats."""
