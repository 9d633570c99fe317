"""Hooks that add gradients over ranks, whole or compressed, and what they leave out."""
