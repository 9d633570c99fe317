"""Gradients added over ranks that train the same weights."""
