"""Keep functions out of code that torch.compile compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])


def leave_uncompiled(function: F) -> F:
    """Return a function that runs uncompiled even if torch.compile compiles its caller.

    A pipeline starts threads and may capture a model. torch.compile can trace neither.
    """
    # torch.compiler.disable would import the compiler, which takes seconds even if nothing is ever compiled.
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]
    return disable(function)  # type: ignore[no-any-return]
