"""The things that torch.compile makes in Python: code in place of the user's, guards, modules around modules."""

from __future__ import annotations

import os
import sys
from types import CodeType
from typing import Any

from torch import nn

from fxsplit.errors import InputError
from fxsplit.torch_internals.user_lines import TORCH

COMPILER = f"{TORCH}_dynamo{os.sep}convert_frame.py"
"""The file in which torch.compile begins to compile a function. The code that runs from there runs once."""


def find_original(code: CodeType) -> CodeType:
    """Return the code that torch.compile has made other code of; code that it has not made as it is."""
    # Whoever has compiled nothing does not pay for importing the compiler.
    utils: Any = sys.modules.get("torch._dynamo.utils")
    known = getattr(utils, "orig_code_map", None)
    found = code if known is None else known.get(code, code)
    return found if isinstance(found, CodeType) else code


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` is put around; any other module as it is.

    Raises InputError for hooks that are on what is put around: the module inside never calls them.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    kind = getattr(frames, "OptimizedModule", ())
    while isinstance(model, kind):
        hooks = [
            name for name, held in vars(model).items() if name.endswith("_hooks") and isinstance(held, dict) and held
        ]
        if hooks:
            raise InputError(
                f"the module that torch.compile returned has hooks of its own ({hooks[0]}): register them on the "
                "module that was given to torch.compile"
            )
        model = model._orig_mod
    return model
