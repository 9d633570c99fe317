"""Checkpoints of training: weights, optimizers and hooks, saved and loaded over any number of devices."""
