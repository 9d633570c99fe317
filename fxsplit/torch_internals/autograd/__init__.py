"""Autograd: where gradients end, how they are added up, and where a backward can be cut in two."""
