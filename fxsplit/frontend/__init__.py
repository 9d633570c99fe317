"""Capture: an nn.Module and an example become the IR that the passes start from."""

from fxsplit.frontend.capture import capture
from fxsplit.frontend.same_graph import same_graph

__all__ = ["capture", "same_graph"]
