"""The inner loops of schedules: arrays in, arrays out.

Kernels are plain Python until `compile_kernels` compiles them, because importing numba takes about a second. Kernels
that call each other are in one file: numba's cache does not notice a change in the file of a called kernel. Call a
kernel through its module, as in `orders.run(...)`, to get the compiled version.
"""

from __future__ import annotations

from functools import cache

from fxsplit.schedule.kernels import orders, rows, walks
from fxsplit.system.kernels import compile_kernel


@cache
def compile_kernels() -> None:
    """Compile each kernel to machine code at its first call. numba's cache keeps the code for later processes."""
    for module in (orders, rows, walks):
        for kernel in module.KERNELS:
            # Kernels find each other in their module.
            setattr(module, kernel.__name__, compile_kernel(kernel))
