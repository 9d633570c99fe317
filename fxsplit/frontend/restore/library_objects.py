"""Owners: find out which objects belong to Python, torch or an installed package, and must not be restored."""

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
"""torch and the packages that it computes with: their internal state does not belong to the user."""

DEFINITIONS = (types.ModuleType, type, types.FunctionType)
"""The types of objects that code defines or imports."""


def is_library(value: Any) -> bool:
    """Return whether a value is a module, class or function of torch or Python itself, which nobody changes."""
    if not is_a(value, (*DEFINITIONS, types.BuiltinFunctionType)):
        return False
    home = value.__name__ if is_a(value, types.ModuleType) else getattr(value, "__module__", None)
    return is_of_library(str(home or "torch"))


def is_of_library(module: str) -> bool:
    """Return whether a module of this name belongs to torch, a package that torch computes with, or Python."""
    top = module.partition(".")[0]
    return top in TORCHS or top in sys.stdlib_module_names


def is_installed(module: str) -> bool:
    """Return whether a module of this name belongs to torch, Python or an installed package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return is_of_library(module) or (isinstance(file, str) and "site-packages" in file)


def is_namespace(value: Any) -> bool:
    """Return whether a value is the dict of a Python module's globals, or `sys.modules`."""
    # Python gives each module both names, and nothing else has them.
    if not is_a(value, dict) or value is sys.modules:
        return value is sys.modules
    # A subclass of dict may override the look-up.
    return dict.__contains__(value, "__spec__") and dict.__contains__(value, "__loader__")


def find_foreign() -> frozenset[int]:
    """Return the ids of the lists, dicts and sets that are globals of installed packages, such as a registry.

    They are not the model's, even if a call of the model writes to them.
    """
    named = list(sys.modules.items())
    libraries = [m for name, m in named if issubclass(type(m), types.ModuleType) and is_installed(name)]
    # Use type(), since reading `__class__` of an object may run any code, for example show a warning.
    held = (value for module in libraries for value in list(vars(module).values()))
    return frozenset(id(value) for value in held if issubclass(type(value), CONTAINERS))


def is_imported(then: Any, now: Any, modules: Collection[str]) -> bool:
    """Return whether a place that was empty before (`then`) now holds an imported module, or a definition from one.

    modules: the modules that were loaded before.
    A submodule of a model counts as well, for example a submodule under torch.compile: a call may create and register
    it once.
    """
    if not (then is None or then is ABSENT) or not is_a(now, (*DEFINITIONS, nn.Module)):
        return False
    home = getattr(now, "__module__", None)
    return is_a(now, (types.ModuleType, nn.Module)) or (home in sys.modules and home not in modules)


def is_definition(then: Any, now: Any) -> bool:
    """Return whether a place that was empty before (`then`) now holds a function or a class, generated at run time."""
    return (then is None or then is ABSENT) and is_a(now, DEFINITIONS)


def holds_tensors(value: Any) -> bool:
    """Return whether a value holds tensors, or the proxies and symbols that stand for them during a trace."""
    return any(is_a(leaf, (Tensor, fx.Proxy, SymInt, SymFloat, SymBool)) for leaf in pytree.tree_leaves(value))
