"""Fake tensors: models without weights in memory, their shapes, and weights that are made up to run them."""
