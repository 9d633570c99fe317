"""The best allocation as a mixed integer linear program, solved by scipy: a referee for dynamic programming."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from fxsplit.allocation.job import Values


def solve_milp(values: Sequence[Values], n_devices: int) -> float:
    """Return the largest sum of one value of each job, on at most `n_devices`; values of -inf are not taken."""
    allowed = [np.flatnonzero(value > -np.inf) for value in values]
    counts = np.concatenate(allowed)
    worth = np.concatenate([value[chosen] for value, chosen in zip(values, allowed, strict=True)])
    # One variable for each job and count that it may have; of each job one is 1.
    one_each = np.repeat(np.eye(len(values)), [len(chosen) for chosen in allowed], axis=1)
    found = milp(
        -worth,
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(counts[None, :], 0, n_devices)],
        integrality=np.ones(len(worth)),
        bounds=Bounds(0, 1),
    )
    assert found.success, found.message
    return -float(found.fun)
