"""Run what torch.vmap runs, as an exported program holds it: between functions that begin and end the vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.vmap import lazy_load_decompositions  # type: ignore[attr-defined]


def run_vmap(body: Callable[..., Any], *values: Any) -> Any:
    """Return what a body returns, which begins and ends a vmap; one that fails leaves none under way in the thread."""
    lazy_load_decompositions()
    before = torch._C._functorch.maybe_current_level()
    try:
        return body(*values)
    finally:
        while torch._C._functorch.maybe_current_level() != before:
            torch._C._functorch._vmap_decrement_nesting()


def is_transformed() -> bool:
    """Return whether the calling thread is inside of a transform of torch.func."""
    return torch._C._functorch.maybe_current_level() is not None
