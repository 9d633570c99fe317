"""Checks that a captured graph equals its model: its outputs (values, outputs) and its gradients (gradients)."""
