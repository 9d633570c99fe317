"""The inner loops of the planner: arrays in, arrays out.

Each kernel is a plain function over arrays (`lattice`, `separable`, `dense`, and `direct.kernels` of that cost model).
For a small graph it runs as it is, in milliseconds. For a large one numba compiles it, and is imported only then,
because loading numba takes about a second. `fit` gives a kernel in the form that is right for the size of a problem.
`run_counted` does so for a kernel that counts its steps: their number says more than the size of the problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar, cast

from fxsplit.planner.kernels import lattice
from fxsplit.planner.kernels.tables import Ints
from fxsplit.system.imports import import_whole

P = ParamSpec("P")
R = TypeVar("R")
SMALL = 600
"""Ideals up to which a search takes all pairs of them at once, see `dense`."""
PLAIN = 3_000
"""Ideals up to which plain Python, which takes a tenth of a second, is quicker than loading numba."""

PLAIN_STEPS = 100_000
"""Steps of a kernel in a process up to which plain Python is quicker than loading numba."""

_preferred = False
_plain_steps: Counter[Callable[..., Any]] = Counter()


def prefer_compiled(preferred: bool = True) -> None:
    """Compile for small graphs too, from now on: for a process that plans again and again. Plans stay the same."""
    # A process decides once: kernels are compiled or not for all plans after.
    global _preferred
    _preferred = preferred


def worth_compiling(ideals: int) -> bool:
    """Return whether to use compiled kernels for a number of ideals."""
    return _preferred or ideals > PLAIN


@cache
def compile_kernel(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel compiled, from numba's cache where an earlier process has compiled it."""
    # numba takes about a second to load, so only who compiles loads it.
    import_whole(["numba"])
    from numba import njit

    machine_code: Callable[..., Any] = njit(cache=True)(kernel)
    return machine_code


def fit(kernel: Callable[P, R], ideals: int) -> Callable[P, R]:
    """Return the kernel, compiled where a problem of so many ideals is worth it."""
    return cast("Callable[P, R]", compile_kernel(kernel)) if worth_compiling(ideals) else kernel


def run_counted(
    kernel: Callable[..., tuple[Ints, Ints, int]], ideals: int, steps: int, *tables: Any
) -> tuple[Ints, Ints, int]:
    """Return the two tables of a kernel, and how many of at most `steps` steps it took.

    It runs in plain Python until it has taken PLAIN_STEPS in this process, and compiled from then on.
    """
    left = 0 if worth_compiling(ideals) else PLAIN_STEPS - _plain_steps[kernel]
    if left > 0:
        one, other, taken = kernel(*tables, min(steps, left))
        _plain_steps[kernel] += taken
        # It has ended, or the caller's own limit stopped it.
        if taken <= min(steps, left) or steps <= left:
            return one, other, taken
    one, other, taken = compile_kernel(kernel)(*tables, steps)
    return one, other, taken


def enumerate_ideals(indegree: Ints, succ_ptr: Ints, succ: Ints, cap: int) -> tuple[Ints, Ints, bool]:
    """Return (parent, last, complete) of every ideal; see `lattice.enumerate_ideals`."""
    # How many ideals there are is what is asked: plain Python counts up to PLAIN before numba is loaded.
    parent, last, complete = fit(lattice.enumerate_ideals, 0)(indegree, succ_ptr, succ, min(cap, PLAIN))
    if not complete and cap > PLAIN:
        parent, last, complete = compile_kernel(lattice.enumerate_ideals)(indegree, succ_ptr, succ, cap)
    return parent, last, bool(complete)
