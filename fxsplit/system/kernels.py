"""Compile functions over arrays to machine code."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from fxsplit.system.imports import import_whole


@cache
def compile_kernel(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled kernel, from numba's on-disk cache if an earlier process compiled it."""
    # numba takes about a second to import: do it only for compiling.
    import_whole(["numba"])
    from numba import njit

    machine_code: Callable[..., Any] = njit(cache=True)(kernel)
    return machine_code
