"""Convert functions of torch to names and back: `torch.relu`, `torch.ops.aten.view.default`, `operator.add`.

A name from a file is looked up among functions that compute with tensors, and never imported.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

_ROOMS: dict[str, Any] = {
    "operator": operator,
    "math": math,
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch._C._nn": torch._C._nn,
    "torch.nn.functional": torch.nn.functional,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
}
"""The places in which a function is looked up."""

_REFUSED = ("from_file", "call", "methodcaller", "attrgetter", "itemgetter", "apply_", "map_", "map2_")
"""Functions in these places that are refused, since they read files, or call any other function."""
_FACTORIES: tuple[str, ...] = (
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
)
_FACTORIES += ("scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros")
"""Functions of torch that make tensors from numbers. torch's list of overridable functions leaves them out."""


def name_function(target: Any) -> str:
    """Return the name of a function: the name under which `find_function` finds it, or else the name in its code."""
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return f"torch.ops.{target}"
    stated = getattr(target, "fxsplit_name", None)
    if isinstance(stated, str):
        return stated
    name = getattr(target, "__name__", "")
    for room, held in _ROOMS.items() if name else ():
        # torch.fft.rfft calls itself fft_rfft.
        for own in (name, name.removeprefix(f"{room.rpartition('.')[2]}_")):
            if getattr(held, own, None) is target:
                return f"{room}.{own}"
    module = getattr(target, "__module__", None) or ""
    qualified = str(getattr(target, "__qualname__", type(target).__name__))
    return f"{module}.{qualified}" if module else qualified


def find_function(name: str) -> Callable[..., Any] | None:
    """Return the function of torch, operator or math that has this name, or None if there is no such function."""
    if name.startswith("torch.ops."):
        return _find_operator(name.removeprefix("torch.ops.").split("."))
    room, _, own = name.rpartition(".")
    found = getattr(_ROOMS.get(room), own, None)
    return found if own not in _REFUSED and own[:1] != "_" and _computes(room, found) else None


def _find_operator(parts: list[str]) -> Callable[..., Any] | None:
    """Return an operator of torch.ops by namespace, name and overload; the overload may be missing."""
    if len(parts) not in (2, 3) or not all(part.isidentifier() for part in parts):
        return None
    namespace = getattr(torch.ops, parts[0], None)
    # torch.ops has methods too, and one of them loads libraries.
    found = getattr(namespace, parts[1], None) if isinstance(namespace, torch._ops._OpNamespace) else None
    if parts[1] in _REFUSED:
        return None
    found = getattr(found, parts[2], None) if len(parts) == 3 and isinstance(found, OpOverloadPacket) else found
    return found if isinstance(found, (OpOverload, OpOverloadPacket)) else None


@cache
def _list_overridable() -> frozenset[int]:
    """Return the ids of the functions in torch's list of overridable functions: these compute with tensors."""
    return frozenset(id(f) for functions in torch.overrides.get_overridable_functions().values() for f in functions)


def _computes(room: str, found: Any) -> bool:
    """Return whether an object is a function that computes with tensors or numbers.

    `room`: the place that it is from.
    """
    if not callable(found) or isinstance(found, (type, types.ModuleType)):
        return False
    if room in ("operator", "math", "torch._C._nn"):
        return True
    own = room == "torch.nn.functional" and getattr(found, "__module__", None) == room
    return own or id(found) in _list_overridable() or (room == "torch" and found.__name__ in _FACTORIES)


class UnknownFunction:
    """Stands for a function that a file names and that torch does not have.

    A graph with it can be planned, but not run.
    """

    def __init__(self, name: str, short: str) -> None:
        self.fxsplit_name = name
        # torch.fx writes these two into the code of the graph.
        self.__name__ = short
        self.__module__ = "unknown"

    def __call__(self, *values: Any, **options: Any) -> Any:
        """Raise NotImplementedError, with the name."""
        raise NotImplementedError(
            f"function {self.fxsplit_name!r} was read from a file and is none of torch's, so the graph does not run: "
            "capture the model again"
        )
