"""The search for the chain of states whose slowest stage is fastest, and bounds that no chain beats."""
