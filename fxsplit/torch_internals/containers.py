"""Small things that several rooms need to know about Python and torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Where frames of a traceback are not the user's: torch and fxsplit."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps its hooks."""


def rebuild(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return `value` in plain tuples, lists, dicts and named tuples, with `leaf` applied to everything else.

    torch.fx keeps a graph's outputs in immutable containers; a model returns plain ones. Other dataclasses, and what
    derives from dict, become dicts.
    """
    if isinstance(value, tuple):
        parts = [rebuild(v, leaf) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [rebuild(v, leaf) for v in value]
    if isinstance(value, dict):
        return {k: rebuild(v, leaf) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type) and type(value) in pytree.SUPPORTED_NODES:
        held = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        return {name: rebuild(v, leaf) for name, v in held.items() if v is not None}  # as torch's pytrees have them
    return leaf(value)


def to_plain_containers(value: Any) -> Any:
    """Return a value in plain containers, whatever its leaves."""
    register_dataclasses(value)
    return rebuild(value, lambda leaf: leaf)


def to_plain_outputs(value: Any) -> Any:
    """Return what a model returns in plain containers, without what no pipeline can hand on.

    See `drop_foreign_fields`.
    """
    return to_plain_containers(drop_foreign_fields(value)[0])


def drop_foreign_fields(value: Any) -> tuple[Any, list[str]]:
    """Return what a model returns without the fields that hold other than tensors and constants, and those fields.

    A language model returns a cache of keys and values unless it is told not to. Dataclasses become known to torch's
    pytrees.
    """
    register_dataclasses(value)
    if isinstance(value, dict):
        unknown = [name for name, held in value.items() if not _is_known(held)]
        kept = {name: held for name, held in value.items() if name not in unknown}
        made: Any = value
        if unknown:
            made = type(value)(**kept) if is_dataclass(value) else type(value)(kept)
        return made, unknown
    return value, []


def register_dataclasses(value: Any) -> None:
    """Let torch's pytrees know the dataclasses in `value`."""
    children: Iterable[Any] = ()
    if is_dataclass(value) and not isinstance(value, type):
        if type(value) not in pytree.SUPPORTED_NODES:
            pytree.register_dataclass(type(value))
        children = (getattr(value, f.name) for f in fields(value))
    elif isinstance(value, (dict, list, tuple)):
        children = value.values() if isinstance(value, dict) else value
    for child in children:
        register_dataclasses(child)


def _is_known(value: Any) -> bool:
    """Return whether all leaves are tensors, or constants that may be compared."""
    constants = (torch.Tensor, bool, int, float, complex, str, type(None))
    return all(isinstance(leaf, constants) for leaf in pytree.tree_leaves(value))
