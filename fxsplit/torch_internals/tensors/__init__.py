"""Tensors: what they consist of, hold, and take in memory, on accelerators too, and how they differ."""
