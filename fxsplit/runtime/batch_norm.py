"""Deferred batch norm: running statistics of the whole batch, although microbatches pass one by one.

A microbatch is still normalised by its own mean and variance. But the running statistics change once a batch, by the
mean and variance of all that the layer saw of it, as if that had come in one piece.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fxsplit.stages import Stages

_here = threading.local()


class Deferred(nn.Module):
    """Calls a batch norm and notes what passes; `finish` then sets its running statistics."""

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.norm = norm
        self._before: tuple[Tensor, ...] | None = None
        self._count = 0
        self._mean: Any = 0.0
        self._squares: Any = 0.0  # summed squares of distances from the mean

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the batch norm returns."""
        if self._before is not None and not getattr(_here, "again", False):
            with torch.no_grad():
                self._note((args[0] if args else kwargs["input"]).detach())
        return cast(Tensor, self.norm(*args, **kwargs))

    def start(self) -> None:
        """Begin a batch; nothing is noted in evaluation, or where there are no running statistics."""
        norm = self.norm
        watched = norm.training and norm.track_running_stats and norm.running_mean is not None
        self._count, self._mean, self._squares = 0, 0.0, 0.0
        self._before = tuple(b.clone() for b in self._statistics()) if watched else None

    def forget(self) -> None:
        """Let the running statistics be what they were before the batch."""
        if self._before is not None:
            self._set(self._before)

    def finish(self) -> None:
        """End a batch: let it count once in the running statistics, with the variance of a sample."""
        watched, self._before = self._before is not None, None
        if not watched or self._count < 2:
            return
        mean, var, seen = self._statistics()  # another call of the same layer may have counted already
        tracked = int(seen) + 1
        share = 1.0 / tracked if self.norm.momentum is None else self.norm.momentum
        unbiased = self._squares / (self._count - 1)
        self._set(
            ((1.0 - share) * mean + share * self._mean, (1.0 - share) * var + share * unbiased, torch.tensor(tracked))
        )

    def _set(self, values: Sequence[Tensor]) -> None:
        """Set the running statistics, as the kernel does: autograd, which has saved them, is not to know."""
        for buffer, value in zip(self._statistics(), values, strict=True):
            buffer.data.copy_(value)

    def _statistics(self) -> tuple[Tensor, ...]:
        """Return the buffers: mean, variance, and how many batches they are of."""
        norm = self.norm
        return cast("tuple[Tensor, ...]", (norm.running_mean, norm.running_var, norm.num_batches_tracked))

    def _note(self, x: Tensor) -> None:
        """Add a microbatch to the mean and the squares, without loss of digits (Chan, Golub and LeVeque 1983)."""
        wide = x if x.dtype == torch.float64 else x.float()
        dims = [d for d in range(x.ndim) if d != 1]
        count = x.numel() // x.shape[1]
        mean = wide.mean(dims)
        squares = (wide - mean.view(1, -1, *[1] * (x.ndim - 2))).square().sum(dims)
        total = self._count + count
        shift = mean - self._mean
        self._squares = self._squares + squares + shift.square() * (self._count * count / total)
        self._mean = self._mean + shift * (count / total)
        self._count = total


def defer(stages: Stages) -> None:
    """Let every batch norm that stages call count whole batches."""
    for stage in stages.stages:
        module = stage.module
        for node in list(module.graph.nodes):
            norm = module.get_submodule(str(node.target)) if node.op == "call_module" else None
            if isinstance(norm, _BatchNorm):
                module.add_submodule(f"deferred_{node.name}", Deferred(norm))
                node.target = f"deferred_{node.name}"
        module.recompile()


@contextmanager
def whole_batch(norms: Sequence[Deferred]) -> Iterator[None]:
    """Count what passes in the block as one batch; a block that fails counts for nothing."""
    for norm in norms:
        norm.start()
    try:
        yield
    finally:
        for norm in norms:
            norm.forget()
    for norm in norms:
        norm.finish()


@contextmanager
def again() -> Iterator[None]:
    """Note nothing of what this thread runs again."""
    before = getattr(_here, "again", False)
    _here.again = True
    try:
        yield
    finally:
        _here.again = before
