"""Hooks that add up gradients over ranks, whole or compressed, and keep the compression error for the next step."""
