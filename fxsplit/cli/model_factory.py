"""The user's functions on the command line: MODULE:FACTORY, which makes a model and the arguments of a call."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fxsplit.errors import InputError, suggest
from fxsplit.system.user_lines import find_users_line


class FactoryResult(NamedTuple):
    """The result of a factory: a model, the arguments of a call, and a target or None."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None


def call_factory(name: str) -> FactoryResult:
    """Call a factory and return its model, arguments, keyword arguments and target.

    `name` is module:function. Raises InputError if it cannot be imported or called, or returns an invalid result.
    """
    factory = import_object(name, "MODULE:FACTORY, such as mymodels:make_resnet")
    # The attribute, and the factory's result, may be any object.
    if not callable(factory):
        raise InputError(f"{name!r} is a {type(factory).__name__}: give a function of no arguments")
    try:
        made = factory()
    except Exception as error:
        raise InputError(f"{name!r} raised {describe_error(error)}; it is called without arguments") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3, 4):
        raise InputError(
            f"{name!r} returned a {type(made).__name__}: return (model, args), (model, args, kwargs) or "
            "(model, args, kwargs, target)"
        )
    model, args, kwargs, target = (*made, {}, None)[:4] if len(made) == 2 else (*made, None)[:4]
    # Most models take one input.
    if not isinstance(args, (tuple, list)):
        args = (args,)
    if not isinstance(kwargs, Mapping):
        raise InputError(f"{name!r} returned a {type(kwargs).__name__} as kwargs: return a dict")
    return FactoryResult(model, tuple(args), dict(kwargs), target)


def import_object(name: str, form: str) -> Any:
    """Import the object `module:attribute`. Raises InputError if the module or the attribute cannot be found."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise InputError(f"{name!r}: write {form}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # find modules in the current folder, as `python -m` does
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        # The module itself, and not one that it imports, is a name that was typed.
        near = [path.stem for path in Path.cwd().glob("*.py")] if getattr(error, "name", None) == module else []
        raise InputError(f"cannot import {module!r}: {error}{suggest(module, near)}") from error
    except Exception as error:  # an error in the module, such as a SyntaxError
        raise InputError(f"cannot import {module!r}: {describe_error(error)}") from error
    try:
        return getattr(found, attribute)
    except AttributeError as error:
        hint = suggest(attribute, vars(found))
        raise InputError(f"module {module!r} has no {attribute!r}{hint}") from error


def describe_error(error: Exception) -> str:
    """Describe an error of the user's code, with the innermost line of that code that raised it."""
    return f"{type(error).__name__}{find_users_line(traceback.walk_tb(error.__traceback__))}: {error}"
