"""Capture: an nn.Module and an example become the IR that the passes start from."""

from fxsplit.trace.capture import capture
from fxsplit.trace.same import same_graph

__all__ = ["capture", "same_graph"]
