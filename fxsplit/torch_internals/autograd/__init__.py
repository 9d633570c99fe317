"""Autograd: leaves and hooks, sums of gradients, and splitting a backward into input and weight gradients."""
