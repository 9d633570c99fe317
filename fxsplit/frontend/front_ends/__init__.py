"""The front ends, which make a graph of a model: symbolic tracing, torch.export, and the user's own graph."""
