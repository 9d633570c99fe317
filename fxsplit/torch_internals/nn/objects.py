"""Register objects among a call's arguments with torch's pytrees, so that the tensors and numbers inside are found.

For `batch = SimpleNamespace(ids=ids, scale=2.0)` pytrees see a single leaf, the object. `take_apart` makes it a tree
with the leaves `ids` and `2.0`, from which pytrees can rebuild an object of the class with other tensors. A value that
cannot be taken apart is *opaque*. Inside an object, a stand-in replaces it and refuses to be read, so that no graph can
contain it.
"""

from __future__ import annotations

import decimal
import fractions
import pathlib
import types
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from fxsplit.errors import InputError
from fxsplit.torch_internals.nn.containers import register_dataclasses

VALUES = (
    *(type(None), bool, int, float, complex, str, bytes, range, decimal.Decimal, fractions.Fraction, pathlib.PurePath),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, np.generic),
)
"""Immutable types with a repr() that describes the value completely."""
NAMED = (
    *(Enum, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, np.ufunc, nn.Module),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)
"""Types with identity: two values are the same only if they are one object."""
CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, tuple, set, frozenset, deque)
"""Container base classes that an object may have. The number of items is part of its structure."""


BLOCK_MASK = "BlockMask"
"""The class of torch's masks for `flex_attention`. Few models use it, and importing it takes long."""


@dataclass(frozen=True)
class Opaque:
    """The replacement of a value that cannot be taken apart.

    kind: the name of the value's type. inside: whether it is part of an object. name: the name of the argument.
    """

    kind: str
    inside: bool
    name: str = ""

    def explain(self) -> str:
        """Return why the value cannot be part of a call, and what the user can do."""
        what = f"argument {self.name!r} is a {self.kind}"
        if self.kind == "ndarray":
            return f"{what}, and a pipeline takes tensors: give torch.from_numpy(...) of the array"
        if self.kind == BLOCK_MASK:
            return (
                f"{what}, whose mask_mod indexes rows of the whole batch: call create_block_mask in the attention "
                "submodule, on tensors that are arguments of forward()"
            )
        if self.kind == PackedSequence.__name__:
            return (
                f"{what}, whose rows are interleaved in memory, so it cannot be cut into microbatches: give forward() "
                "the padded tensor and the lengths, and pack them inside a submodule, which stays whole"
            )
        return (
            f"{what}, which a pipeline can neither cut into microbatches nor check for changes: give its tensors and "
            "numbers as arguments, or make it an attribute of the model"
        )


class StandIn:
    """Replaces an opaque value in a call of forward(). Reading anything of the stand-in raises InputError."""

    def __init__(self, opaque: Opaque) -> None:
        object.__setattr__(self, "_opaque", opaque)

    def _refuse(self, *_: Any) -> Any:
        raise InputError(
            f"forward() reads an argument that no graph can hold: {object.__getattribute__(self, '_opaque').explain()}"
        )

    __getattribute__ = _refuse

    # Python looks these up on the class, without __getattribute__.
    __bool__ = __call__ = __contains__ = __eq__ = __float__ = __ge__ = __getitem__ = __gt__ = __index__ = _refuse
    __int__ = __iter__ = __le__ = __len__ = __lt__ = __ne__ = __next__ = __repr__ = __str__ = __enter__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = _refuse
    __hash__ = _refuse


class ObjectParts:
    """The parts of an object: its class, its attributes by name, and its items and keys if it is a container."""

    def __init__(self, kind: Any, attributes: dict[str, Any], items: list[Any], keys: tuple[Any, ...] | None) -> None:
        self.kind, self.attributes, self.items, self.keys = kind, attributes, items, keys


def take_apart(value: Any, around: tuple[int, ...] = ()) -> Any:
    """Return an object as its parts, an ObjectParts, or as Opaque if it cannot be rebuilt from parts.

    value: a leaf of torch's pytrees. Tensors, constants and stand-ins are returned unchanged.
    around: the ids of the objects that contain the value.
    """
    kind = type(value)
    if kind is StandIn or is_a(value, (Tensor, *NAMED, Opaque)):
        return value
    # A subclass, such as a user's own str, may carry attributes besides its value.
    if is_a(value, VALUES) and not getattr(value, "__dict__", None):
        return value
    if isinstance(value, types.MethodType) and isinstance(value.__self__, NAMED):
        return value
    if is_packed(value):
        return Opaque(kind.__qualname__, inside=bool(around))
    # An object that contains itself has no finite tree. An object whose class has hidden state cannot be rebuilt.
    if id(value) in around or len(around) > 20 or not _can_be_made(kind) or kind.__name__ == BLOCK_MASK:
        return Opaque(kind.__qualname__, inside=bool(around))
    attributes = _read_attributes(value)
    inside = (*around, id(value))
    keys: tuple[Any, ...] | None = None
    items: list[Any] = []
    if isinstance(value, dict):
        keys, items = tuple(value), list(dict.values(value))
    elif isinstance(value, CONTAINERS):
        # The items of a set have no order, so sort them.
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else list(value)
    for held in (*attributes.values(), *items):
        if type(held) is not StandIn:
            register_dataclasses(held)
    attributes, items = pytree.tree_map(lambda leaf: take_apart(leaf, inside), (attributes, items), is_leaf=is_packed)
    return ObjectParts(kind, attributes, items, keys)


def is_packed(value: Any) -> bool:
    """Return whether a value is a PackedSequence, which torch's pytrees treat as a tuple of tensors."""
    # By type(): isinstance() would read the __class__ of a stand-in, which raises.
    return issubclass(type(value), PackedSequence)


def is_a(value: Any, kinds: Any) -> bool:
    """Return whether a value's type is one of `kinds`. Unlike isinstance(), this does not access the value.

    A weakref.proxy forwards the access to its referent, which fails if the referent is gone.
    """
    return issubclass(type(value), kinds)


def same_constant(a: Any, b: Any) -> bool:
    """Return whether two leaves that are not tensors are equal in every computation. Never calls a user's __eq__."""
    if a is b:
        return True
    # Compare types too: True equals 1, but their graphs may differ. repr() tells 0.0 from -0.0.
    if type(a) is not type(b):
        return False
    if is_a(a, types.MethodType):
        return bool(a.__func__ is b.__func__ and a.__self__ is b.__self__)
    return is_a(a, (*VALUES, Opaque)) and repr(a) == repr(b)


def _read_attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes by name, from its slots and its __dict__."""
    found: dict[str, Any] = {}
    for kind in (k for k in type(value).__mro__ if "__slots__" in vars(k)):
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType):
                # A slot may be unassigned.
                with suppress(AttributeError):
                    found[name] = slot.__get__(value)
    return found | dict(getattr(value, "__dict__", {}))


def _find_base(kind: Any) -> Any:
    """Return the base class that allocates objects of a class: its container type, or object."""
    return next((base for base in (*CONTAINERS, types.SimpleNamespace) if issubclass(kind, base)), object)


def _can_be_made(kind: Any) -> bool:
    """Return whether objects of a class have no state except attributes and items."""
    try:
        # Python refuses if the class has C state of its own, as files, generators and numpy arrays do.
        _find_base(kind).__new__(kind)
    except TypeError:
        return False
    return True


def _make_object(parts: Any, context: tuple[Any, tuple[str, ...], int, tuple[Any, ...] | None]) -> Any:
    """Rebuild an object of the class in `context` from its attributes and items."""
    kind, names, _, keys = context
    held = list(parts)
    items = held[len(names) :]
    base = _find_base(kind)
    made = base.__new__(kind, items) if base in (tuple, frozenset) else base.__new__(kind)
    if keys is not None:
        base.__init__(made, zip(keys, items, strict=True))
    elif base in (list, set, deque):
        base.__init__(made, items)
    for name, value in zip(names, held[: len(names)], strict=True):
        # Bypass the class's own __setattr__, which may refuse, as in a frozen dataclass.
        object.__setattr__(made, name, value)
    return made


def _flatten(parts: ObjectParts) -> tuple[list[Any], tuple[Any, tuple[str, ...], int, tuple[Any, ...] | None]]:
    """Return the attributes and items as leaves, and the context from which `_make_object` rebuilds the object."""
    return [*parts.attributes.values(), *parts.items], (
        parts.kind,
        tuple(parts.attributes),
        len(parts.items),
        parts.keys,
    )


def _flatten_with_keys(parts: ObjectParts) -> tuple[list[Any], Any]:
    """Return the same as `_flatten`, with a key for each leaf."""
    values, context = _flatten(parts)
    keys = range(len(parts.items)) if parts.keys is None else parts.keys
    names = [*map(pytree.GetAttrKey, parts.attributes), *map(pytree.MappingKey, keys)]
    return list(zip(names, values, strict=True)), context


pytree.register_pytree_node(
    ObjectParts, _flatten, _make_object, serialized_type_name="fxsplit.Parts", flatten_with_keys_fn=_flatten_with_keys
)
