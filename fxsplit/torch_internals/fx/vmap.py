"""Run the body of a torch.vmap as an exported program stores it. Such a body enters and leaves the vmap itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.vmap import lazy_load_decompositions  # type: ignore[attr-defined]


def run_vmap(body: Callable[..., Any], *values: Any) -> Any:
    """Run a body that enters a level of vmap and leaves it again. If the body fails, this leaves the level."""
    lazy_load_decompositions()
    before = torch._C._functorch.maybe_current_level()
    try:
        return body(*values)
    finally:
        while torch._C._functorch.maybe_current_level() != before:
            torch._C._functorch._vmap_decrement_nesting()


def is_transformed() -> bool:
    """Return whether the calling thread is inside a transform of torch.func."""
    return torch._C._functorch.maybe_current_level() is not None
