"""The things that torch.compile makes in Python: code in place of the user's, guards, modules around modules."""

from __future__ import annotations

import inspect
import os
import sys
from types import CodeType
from typing import Any

from torch import nn

from fxsplit.errors import InputError
from fxsplit.torch_internals.user_lines import TORCH

COMPILER = f"{TORCH}_dynamo{os.sep}convert_frame.py"
"""The file in which torch.compile begins to compile a function. The code that runs from there runs once."""
_WRAPS = "_torchdynamo_orig_callable"
"""The attribute of a function of torch.compile's that holds the function inside."""
_CALLS = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")
"""The methods that run a module."""


def find_original(code: CodeType) -> CodeType:
    """Return the code that torch.compile has made other code of; code that it has not made as it is."""
    # Whoever has compiled nothing does not pay for importing the compiler.
    utils: Any = sys.modules.get("torch._dynamo.utils")
    known = getattr(utils, "orig_code_map", None)
    found = code if known is None else known.get(code, code)
    return found if isinstance(found, CodeType) else code


def unwrap_compiled(model: Any) -> nn.Module:
    """Return the module that torch.compile and torch.compiler.disable were put around, in whatever order and number.

    They may have been given the module, or its forward(). A module without them is returned as it is.

    Raises InputError for anything else, and for hooks on what is put around: the module inside never calls them.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    kind = getattr(frames, "OptimizedModule", ())
    found = model
    while True:
        if isinstance(found, kind):
            _refuse_hooks(found)
            found = found._orig_mod
        elif _WRAPS in getattr(found, "__dict__", ()) and not isinstance(found, nn.Module):
            found = inspect.unwrap(getattr(found, _WRAPS))
        elif (
            isinstance(getattr(found, "__self__", None), nn.Module) and found.__name__ in _CALLS and found is not model
        ):
            found = found.__self__
        elif isinstance(found, nn.Module):
            return found
        else:
            name = getattr(model, "__qualname__", None)
            given = f"the torch.nn.Module that {name!r} runs" if isinstance(name, str) else "a torch.nn.Module"
            raise InputError(f"model is a {type(model).__name__}: give {given}")


def _refuse_hooks(compiled: nn.Module) -> None:
    """Raise InputError for hooks on a module that torch.compile has returned."""
    hooks = [
        name for name, held in vars(compiled).items() if name.endswith("_hooks") and isinstance(held, dict) and held
    ]
    if hooks:
        raise InputError(
            f"the module that torch.compile returned has hooks of its own ({hooks[0]}): register them on the module "
            "that was given to torch.compile"
        )
