"""The front ends, which each make a graph of a model: symbolic tracing, torch.export, the user's own graph."""
