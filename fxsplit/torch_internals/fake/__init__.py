"""Fake tensors: models without weights in memory, shape inference, and made-up weights for running such models."""
