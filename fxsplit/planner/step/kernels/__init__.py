"""The inner loops of the search for the shortest step: arrays in, arrays out.

They are plain Python until `compile_kernels` has made machine code of them; importing numba takes about a second. Those
that call each other are in one file, because numba's cache notices only a change of the file of a kernel itself. Call
them by their module, as in `bound.test_line(...)`, to get the compiled ones.
"""

from __future__ import annotations

from functools import cache

from fxsplit.planner.step.kernels import bound, search, sums
from fxsplit.system.kernels import compile_kernel


@cache
def compile_kernels() -> None:
    """Make machine code of all kernels, when each is first called; numba's cache keeps it for other processes."""
    for module in (bound, search, sums):
        for kernel in module.KERNELS:
            # Kernels find each other in their module.
            setattr(module, kernel.__name__, compile_kernel(kernel))
