"""Find the user's own code and module inside objects that torch.compile has made."""

from __future__ import annotations

import inspect
import os
import sys
from types import CodeType
from typing import Any

import torch
from torch import nn

from fxsplit.errors import InputError, TraceError
from fxsplit.system.user_lines import TORCH

COMPILER = f"{TORCH}_dynamo{os.sep}convert_frame.py"
"""The file in which torch.compile starts to compile a function. Code called from there runs only once."""
_WRAPS = "_torchdynamo_orig_callable"
"""The attribute in which a function compiled by torch.compile keeps the original function."""
_HOLDS = "_orig_mod"
"""The attribute in which a module compiled by torch.compile keeps the original module."""
_CALLS = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")
"""The methods that run a module."""


def find_original(code: CodeType) -> CodeType:
    """Return the code from which torch.compile made `code`, or `code` itself if torch.compile did not make it."""
    # Do not import the compiler if nothing was compiled.
    utils: Any = sys.modules.get("torch._dynamo.utils")
    known = getattr(utils, "orig_code_map", None)
    found = code if known is None else known.get(code, code)
    return found if isinstance(found, CodeType) else code


def is_compiled(function: Any) -> bool:
    """Return whether torch.compile, or torch.compiler.disable, returned this function or module."""
    return hasattr(function, _WRAPS) or hasattr(function, _HOLDS)


def unwrap_compiled(model: Any) -> nn.Module:
    """Return the module inside any nesting of torch.compile and torch.compiler.disable.

    They may wrap the module or its forward(). A module without wrappers is returned as it is. Raises InputError for
    anything that is not a module, and for hooks on a wrapper, which the module inside would never call. Raises
    TraceError for a module of torch.jit.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    kind = getattr(frames, "OptimizedModule", ())
    found = model
    while True:
        if isinstance(found, kind):
            _refuse_hooks(found)
            found = getattr(found, _HOLDS)
        elif _WRAPS in getattr(found, "__dict__", ()) and not isinstance(found, nn.Module):
            found = inspect.unwrap(getattr(found, _WRAPS))
        elif (
            isinstance(getattr(found, "__self__", None), nn.Module) and found.__name__ in _CALLS and found is not model
        ):
            found = found.__self__
        elif isinstance(found, torch.jit.ScriptModule):
            raise TraceError(
                f"model is a {type(found).__name__} from torch.jit, which keeps its parameters to itself: give the "
                "module that it was scripted or traced from"
            )
        elif isinstance(found, nn.Module):
            return found
        else:
            name = getattr(model, "__qualname__", None)
            given = f"the torch.nn.Module that {name!r} runs" if isinstance(name, str) else "a torch.nn.Module"
            raise InputError(f"model is a {type(model).__name__}: give {given}")


def _refuse_hooks(compiled: nn.Module) -> None:
    """Raise InputError if a module returned by torch.compile has hooks."""
    hooks = [
        name for name, held in vars(compiled).items() if name.endswith("_hooks") and isinstance(held, dict) and held
    ]
    if hooks:
        raise InputError(
            f"the module that torch.compile returned has hooks of its own ({hooks[0]}): register them on the module "
            "that was given to torch.compile"
        )
