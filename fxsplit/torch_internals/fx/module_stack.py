"""The submodules that a node of a graph was traced in, as fx and torch.export note them."""

from __future__ import annotations

from torch import fx

_NONE = "_empty_nn_module_stack_from_metadata_hook"
"""What torch.export notes of a node that its own passes have added, which is in no module."""


def list_module_paths(node: fx.Node) -> list[str]:
    """Return the paths of the submodules that a node was traced in, outermost first; none for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    return [str(path) for key, (path, *_) in stack.items() if key != _NONE and path]


def find_module_path(node: fx.Node) -> str:
    """Return the path of the innermost submodule that a node was traced in; empty for the model itself."""
    return next(reversed(list_module_paths(node)), "")
