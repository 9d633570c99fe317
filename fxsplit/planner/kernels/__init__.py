"""The inner loops of the planner: arrays in, arrays out.

A kernel is a plain function over arrays (`lattice`, `separable`, `dense`, and `direct.kernels` for that cost model). On
a small graph it runs in plain Python, in milliseconds. On a large graph numba compiles it; numba is imported only then,
since the import takes about a second. `fit` picks the form by the number of ideals, `run_counted` by the number of
steps, which predicts the time better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from fxsplit.planner.kernels import lattice
from fxsplit.planner.kernels.tables import Ints
from fxsplit.system.kernels import compile_kernel

P = ParamSpec("P")
R = TypeVar("R")
SMALL = 600
"""Up to this number of ideals, a search takes all pairs of ideals at once; see `dense`."""
PLAIN = 3_000
"""Up to this number of ideals, plain Python takes a tenth of a second, and so less than the import of numba."""

PLAIN_STEPS = 100_000
"""Up to this number of steps of a kernel in a process, plain Python takes less time than the import of numba."""

_preferred = False
_plain_steps: Counter[Callable[..., Any]] = Counter()


def prefer_compiled(preferred: bool = True) -> None:
    """Compile for small graphs too from now on, for a process that plans repeatedly. Plans stay the same."""
    # The choice is global: it holds for all later plans of the process.
    global _preferred
    _preferred = preferred


def worth_compiling(ideals: int) -> bool:
    """Return whether compiled kernels pay off for this number of ideals."""
    return _preferred or ideals > PLAIN


def fit(kernel: Callable[P, R], ideals: int) -> Callable[P, R]:
    """Return the kernel, compiled if that pays off for this number of ideals."""
    return cast("Callable[P, R]", compile_kernel(kernel)) if worth_compiling(ideals) else kernel


def run_counted(
    kernel: Callable[..., tuple[Ints, Ints, int]], ideals: int, steps: int, *tables: Any
) -> tuple[Ints, Ints, int]:
    """Run a kernel for at most `steps` steps; return its two tables and the steps it took.

    For few ideals it runs in plain Python for its first PLAIN_STEPS steps in this process, and compiled after that.
    """
    left = 0 if worth_compiling(ideals) else PLAIN_STEPS - _plain_steps[kernel]
    if left > 0:
        one, other, taken = kernel(*tables, min(steps, left))
        _plain_steps[kernel] += taken
        # The kernel finished, or reached the caller's own limit.
        if taken <= min(steps, left) or steps <= left:
            return one, other, taken
    one, other, taken = compile_kernel(kernel)(*tables, steps)
    return one, other, taken


def enumerate_ideals(indegree: Ints, succ_ptr: Ints, succ: Ints, cap: int) -> tuple[Ints, Ints, bool]:
    """Return (parent, last, complete) of all ideals, at most `cap`; see `lattice.enumerate_ideals`."""
    # The number of ideals is unknown beforehand: count up to PLAIN in plain Python before importing numba.
    parent, last, complete = fit(lattice.enumerate_ideals, 0)(indegree, succ_ptr, succ, min(cap, PLAIN))
    if not complete and cap > PLAIN:
        parent, last, complete = compile_kernel(lattice.enumerate_ideals)(indegree, succ_ptr, succ, cap)
    return parent, last, bool(complete)
