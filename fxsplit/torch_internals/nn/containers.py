"""Convert what models return to plain containers, and name the attributes that hold a module's hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.utils import _pytree as pytree

from fxsplit.errors import InputError

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes in which a module keeps its hooks."""
CONSTANTS = (torch.Tensor, bool, int, float, complex, str, type(None))
"""The types of values that a pipeline can hand on from stage to stage."""


def has_global_hooks() -> bool:
    """Return whether hooks for every module are registered, as by register_module_forward_hook()."""
    return any(getattr(torch_modules, f"_global{kind}") for kind in HOOKS)


def rebuild(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return `value` rebuilt from plain tuples, lists, dicts and named tuples, with `leaf` applied to everything else.

    torch.fx keeps a graph's outputs in immutable containers, but a model returns plain containers. Dataclasses that are
    registered with torch's pytrees become dicts without the fields that are None. Subclasses of dict become dicts with
    all items.
    """
    if isinstance(value, tuple):
        parts = [rebuild(v, leaf) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [rebuild(v, leaf) for v in value]
    # Before dataclasses: outputs of transformers' models are both, and their items omit fields that are None.
    if isinstance(value, dict):
        return {k: rebuild(v, leaf) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type) and type(value) in pytree.SUPPORTED_NODES:
        held = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        # torch's pytrees omit fields that are None too, so both count the same leaves.
        return {name: rebuild(v, leaf) for name, v in held.items() if v is not None}
    return leaf(value)


def to_plain_containers(value: Any) -> Any:
    """Convert a value to plain containers, with the same leaves. Registers its dataclasses with torch's pytrees."""
    register_dataclasses(value)
    return rebuild(value, lambda leaf: leaf)


def to_plain_outputs(value: Any) -> Any:
    """Convert a model's output to plain containers, without the fields that `drop_foreign_fields` drops."""
    return to_plain_containers(drop_foreign_fields(value)[0])


def drop_foreign_fields(value: Any) -> tuple[Any, list[str]]:
    """Return a model's output without the fields that a pipeline cannot hand on, and the names of these fields.

    A field may hold only tensors and constants. For example, a language model returns a KV cache unless
    use_cache=False. Only the items of a dict at the top level are checked.
    """
    register_dataclasses(value)
    foreign = [name for name, v in value.items() if not _has_plain_leaves(v)] if isinstance(value, dict) else []
    if not foreign:
        return value, []
    kept = {name: held for name, held in value.items() if name not in foreign}
    kind: Any = type(value)
    # A dataclass that is also a dict fills its items from its fields, which are set by keyword.
    return kind(**kept) if is_dataclass(value) else kind(kept), foreign


class ForeignOutput(InputError):
    """A model returns a value that no pipeline can hand on. No other front end would help."""


def refuse_foreign_parts(name: str, value: Any) -> None:
    """Raise ForeignOutput if model `name` returns a tuple or list that holds a value other than tensors and constants.

    Fields of other containers are dropped, or the check of the graph reports them.
    """
    if type(value) not in (tuple, list):
        return
    register_dataclasses(value)
    plain = (*CONSTANTS, torch.SymInt, torch.SymFloat, torch.SymBool)
    found = next((leaf for leaf in pytree.tree_leaves(value) if not isinstance(leaf, plain)), None)
    if found is not None:
        # Dropping the value from a tuple would change the places of the values after it.
        raise ForeignOutput(
            f"{name} returns a {type(found).__name__} in a {type(value).__name__}, which a pipeline cannot hand on: "
            "return only tensors, numbers and texts (a model of Hugging Face makes no cache with use_cache=False, and "
            "with return_dict=True the pipeline leaves it out)"
        )


def register_dataclasses(value: Any) -> None:
    """Register the classes of all dataclasses in `value` with torch's pytrees, which otherwise treat them as leaves."""
    children: Iterable[Any] = ()
    if is_dataclass(value) and not isinstance(value, type):
        # torch refuses to register a class twice, or with a constructor that does not take all fields.
        if type(value) not in pytree.SUPPORTED_NODES and all(f.init for f in fields(value)):
            pytree.register_dataclass(type(value))
        children = (getattr(value, f.name) for f in fields(value))
    elif isinstance(value, (dict, list, tuple)):
        children = value.values() if isinstance(value, dict) else value
    for child in children:
        register_dataclasses(child)


def _has_plain_leaves(value: Any) -> bool:
    """Return whether all leaves are tensors or comparable constants."""
    return all(isinstance(leaf, CONSTANTS) for leaf in pytree.tree_leaves(value))
