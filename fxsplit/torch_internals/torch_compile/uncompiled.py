"""Keep functions out of what torch.compile compiles around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])


def leave_uncompiled(function: F) -> F:
    """Return a function that runs as it is, also where torch.compile compiles the caller.

    A pipeline starts threads and may capture a model, of which torch.compile can make no graph.
    """
    # torch.compiler.disable would import the compiler, which takes seconds, for those who never compile.
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]
    return disable(function)  # type: ignore[no-any-return]
