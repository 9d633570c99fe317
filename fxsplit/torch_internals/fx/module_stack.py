"""Find the submodules and the user's lines from which a node of a graph was traced. fx and torch.export record them."""

from __future__ import annotations

from torch import fx

from fxsplit.system.user_lines import is_users

_NONE = "_empty_nn_module_stack_from_metadata_hook"
"""torch.export's entry for a node that was added by its own passes and belongs to no module."""


def list_module_paths(node: fx.Node) -> list[str]:
    """Return the paths of the submodules in which a node was traced, outermost first, without the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    return [str(path) for key, (path, *_) in stack.items() if key != _NONE and path]


def find_module_path(node: fx.Node) -> str:
    """Return the path of the innermost submodule in which a node was traced, or "" for the model itself."""
    return next(reversed(list_module_paths(node)), "")


def find_user_line(node: fx.Node) -> str:
    """Return the user's file and line in which a node was traced, such as `File "net.py", line 12`; "" if unknown."""
    rows = (row.strip() for row in str(node.meta.get("stack_trace") or "").splitlines())
    places = [row.split(", in ")[0] for row in rows if row.startswith('File "')]
    # The innermost frame is last.
    return next((place for place in reversed(places) if is_users(place.split('"')[1])), "")
