"""Capture: an nn.Module and an example become the IR that the passes start from."""
