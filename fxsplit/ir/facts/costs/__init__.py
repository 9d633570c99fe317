"""Costs: the time and memory of each node, the bytes that cross a cut, and where these figures come from."""
