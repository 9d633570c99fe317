"""Allow for kernels that add in the order in which their threads arrive: no two runs of such a model are equal.

Many kernels of accelerators do so, such as the backward of attention. The model then runs again, and its graph may
differ from the model about as much as two runs of the model differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from math import sqrt

import torch
from torch import Tensor

from fxsplit.torch_internals.tensors.accelerators import is_accelerator

TOLERANCE = 1e-5
"""The allowed rounding, relative to the largest value. The same operators in the same order mostly give equal bits."""
RUNS = 2
"""How often the model runs again to see how much its runs differ."""
AMPLE = 8.0
"""The allowed difference, as a multiple of the largest seen between runs: a few runs need not show the largest."""
MOST = 0.1
"""The most that noise may allow, relative to the largest value: runs that differ by more compute something else."""


class Noise:
    """The differences between runs of the same model. They are measured only if the graph differs from the model.

    run_again: runs the model on the same rows, and returns its values by name.
    """

    def __init__(self, run_again: Callable[[], Mapping[str, Tensor]]) -> None:
        self._run_again = run_again

    def covers(self, name: str, wanted: Tensor, found: Tensor, largest: float | None = None) -> bool:
        """Return whether a value of the graph (`found`) equals the model's value (`wanted`), up to rounding and noise.

        largest: the largest magnitude of all values of this kind (default: that of `wanted`). Give it if a small value
            may be the difference of large values.
        """
        # Most often the bits are the same, and comparing them takes no memory.
        if torch.equal(wanted, found) or not _is_rounded(wanted) or wanted.numel() == 0:
            return torch.equal(wanted, found)
        wanted, found = wanted.detach(), found.detach()
        own = find_largest(wanted)
        largest = own if largest is None else largest
        if _is_near(wanted, found, TOLERANCE * largest):
            return True
        if not is_accelerator(wanted.device) or not self._differs:
            return False
        # Half of the digits, as a difference between runs need not show in a tensor of few values.
        rounding = sqrt(torch.finfo(wanted.dtype).eps) * own
        seen = max(find_largest(again[name].detach() - wanted) for again in self._runs)
        return _is_near(wanted, found, rounding + min(AMPLE * seen, MOST * largest))

    @cached_property
    def _runs(self) -> list[Mapping[str, Tensor]]:
        """The values of further runs of the model."""
        return [self._run_again() for _ in range(RUNS)]

    @cached_property
    def _differs(self) -> bool:
        """Whether the runs differ in any value."""
        first, *others = self._runs
        return any(not torch.equal(value, other[name]) for other in others for name, value in first.items())


def find_largest(tensor: Tensor) -> float:
    """Return the largest finite magnitude in a tensor, or 0."""
    return float(torch.nan_to_num(tensor.detach().abs(), posinf=0.0).max()) if tensor.numel() else 0.0


def _is_near(a: Tensor, b: Tensor, allowed: float) -> bool:
    """Return whether two tensors differ by at most `allowed`, or by rounding, in every entry. NaN equals NaN."""
    return torch.allclose(a, b, rtol=TOLERANCE, atol=allowed, equal_nan=True)


def _is_rounded(tensor: Tensor) -> bool:
    """Return whether a tensor has a dtype in which arithmetic rounds: floating-point or complex."""
    return tensor.is_floating_point() or tensor.is_complex()
