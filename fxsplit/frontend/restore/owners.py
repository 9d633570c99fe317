"""Owners: which objects are Python's, torch's or an installed package's own, and so not the user's to put back."""

from __future__ import annotations

import sys
import types
from collections.abc import Collection
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxsplit.frontend.restore.items import CONTAINERS
from fxsplit.ir.facts.capture.python_state import ABSENT
from fxsplit.torch_internals.nn.objects import is_a

TORCHS = ("torch", "functorch", "torchgen", "numpy", "sympy", "mpmath", "triton")
"""torch and the packages that it computes with: what they keep for themselves is no user's."""

DEFINITIONS = (types.ModuleType, type, types.FunctionType)
"""The types of what code defines or imports."""


def is_library(value: Any) -> bool:
    """Return whether a value is a module, class or function of torch's or of Python's own, which nobody changes."""
    if not is_a(value, (*DEFINITIONS, types.BuiltinFunctionType)):
        return False
    home = value.__name__ if is_a(value, types.ModuleType) else getattr(value, "__module__", None)
    return is_of_library(str(home or "torch"))


def is_of_library(module: str) -> bool:
    """Return whether a module's name is one of torch's or of Python's own."""
    top = module.partition(".")[0]
    return top in TORCHS or top in sys.stdlib_module_names


def is_installed(module: str) -> bool:
    """Return whether a module is torch's, Python's own, or one of an installed package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return is_of_library(module) or (isinstance(file, str) and "site-packages" in file)


def is_namespace(value: Any) -> bool:
    """Return whether a value is the dict of a module, or of all modules."""
    # Python gives each module both names, and nothing else has them.
    if not is_a(value, dict) or value is sys.modules:
        return value is sys.modules
    # A class derived from dict may refuse to be asked.
    return dict.__contains__(value, "__spec__") and dict.__contains__(value, "__loader__")


def find_foreign() -> frozenset[int]:
    """Return the identities of the containers that modules of libraries hold, such as a package's registry."""
    named = list(sys.modules.items())
    libraries = [m for name, m in named if issubclass(type(m), types.ModuleType) and is_installed(name)]
    # By its type: an object may do anything when it is asked for its class, such as warn.
    held = (value for module in libraries for value in list(vars(module).values()))
    return frozenset(id(value) for value in held if issubclass(type(value), CONTAINERS))


def is_imported(then: Any, now: Any, modules: Collection[str]) -> bool:
    """Return whether a place that held nothing has a module now, or a definition of a module not in `modules`.

    A submodule of a model counts as well, such as one under torch.compile: a call may make and register it once.
    """
    if not (then is None or then is ABSENT) or not is_a(now, (*DEFINITIONS, nn.Module)):
        return False
    home = getattr(now, "__module__", None)
    return is_a(now, (types.ModuleType, nn.Module)) or (home in sys.modules and home not in modules)


def is_definition(then: Any, now: Any) -> bool:
    """Return whether a place that held nothing has a function or a class now, which somebody has made to measure."""
    return (then is None or then is ABSENT) and is_a(now, DEFINITIONS)


def holds_tensors(value: Any) -> bool:
    """Return whether a value holds tensors, or stand-ins for tensors and lengths of a model that is traced."""
    return any(is_a(leaf, (Tensor, fx.Proxy, SymInt, SymFloat, SymBool)) for leaf in pytree.tree_leaves(value))
