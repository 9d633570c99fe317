"""Rebuild what models return out of plain containers, and name where modules keep their hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.utils import _pytree as pytree

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes in which a module keeps its hooks."""


def has_global_hooks() -> bool:
    """Return whether torch calls hooks for every module, as register_module_forward_hook() makes them."""
    return any(getattr(torch_modules, f"_global{kind}") for kind in HOOKS)


def rebuild(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return `value` in plain tuples, lists, dicts and named tuples, with `leaf` applied to everything else.

    torch.fx keeps a graph's outputs in immutable containers, and a model returns plain ones. Dataclasses that torch's
    pytrees know become dicts without the fields that are None, and so do classes derived from dict (with all items).
    """
    if isinstance(value, tuple):
        parts = [rebuild(v, leaf) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [rebuild(v, leaf) for v in value]
    # Before dataclasses: what transformers' models return is both, and its items leave out what is None.
    if isinstance(value, dict):
        return {k: rebuild(v, leaf) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type) and type(value) in pytree.SUPPORTED_NODES:
        held = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        # torch's pytrees leave out fields that are None too, so both count the same leaves.
        return {name: rebuild(v, leaf) for name, v in held.items() if v is not None}
    return leaf(value)


def to_plain_containers(value: Any) -> Any:
    """Return a value in plain containers, with its leaves as they are. Its dataclasses become known to pytrees."""
    register_dataclasses(value)
    return rebuild(value, lambda leaf: leaf)


def to_plain_outputs(value: Any) -> Any:
    """Return what a model returns in plain containers, without the fields that `drop_foreign_fields` drops."""
    return to_plain_containers(drop_foreign_fields(value)[0])


def drop_foreign_fields(value: Any) -> tuple[Any, list[str]]:
    """Return what a model returns without fields that hold other than tensors and constants, and those fields' names.

    No pipeline can hand such fields from stage to stage. For example, a language model returns a cache of keys and
    values unless it is told not to. Only the items of a dict at the top are looked at.
    """
    register_dataclasses(value)
    foreign = [name for name, v in value.items() if not _has_plain_leaves(v)] if isinstance(value, dict) else []
    if not foreign:
        return value, []
    kept = {name: held for name, held in value.items() if name not in foreign}
    kind: Any = type(value)
    # A dataclass that is also a dict fills its items from its fields, which keywords set.
    return kind(**kept) if is_dataclass(value) else kind(kept), foreign


def register_dataclasses(value: Any) -> None:
    """Make the classes of all dataclasses in `value` known to torch's pytrees, which would take them for leaves."""
    children: Iterable[Any] = ()
    if is_dataclass(value) and not isinstance(value, type):
        # A class that is registered twice is an error; so is one whose constructor does not take all fields.
        if type(value) not in pytree.SUPPORTED_NODES and all(f.init for f in fields(value)):
            pytree.register_dataclass(type(value))
        children = (getattr(value, f.name) for f in fields(value))
    elif isinstance(value, (dict, list, tuple)):
        children = value.values() if isinstance(value, dict) else value
    for child in children:
        register_dataclasses(child)


def _has_plain_leaves(value: Any) -> bool:
    """Return whether all leaves are tensors, or constants that may be compared."""
    constants = (torch.Tensor, bool, int, float, complex, str, type(None))
    return all(isinstance(leaf, constants) for leaf in pytree.tree_leaves(value))
