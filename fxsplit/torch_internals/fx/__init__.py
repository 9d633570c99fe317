"""torch.fx: run graphs, observe them, find out what their nodes read, and keep values from call to call."""
