"""Batch norm's running statistics, where a batch norm cannot write them as microbatches pass.

It may not, because they are to change once a batch (deferred batch norm), or because replicas of its stage pass
microbatches at the same time, in no order. Then what it would have written is noted, and written at the end of the
batch: as one change by all that the layer saw, or as the changes of one microbatch after another."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fxsplit.errors import InputError
from fxsplit.torch_internals.containers import HOOKS
from fxsplit.torch_internals.rng import current_microbatch

_here = threading.local()


Statistics = tuple[int, Tensor, Tensor]
"""Of one call: how many values each channel had, their mean, and their variance as of a sample."""


Calls = dict[int, list[Statistics]]
"""The calls that were noted, by microbatch."""


class Noted(nn.Module):
    """Calls a batch norm that leaves its running statistics alone, and notes them; `finish` sets them.

    `at_once`: they change once a batch, and not once a microbatch.
    """

    def __init__(self, norm: _BatchNorm, at_once: bool, calls: Calls) -> None:
        super().__init__()
        self.norm = norm
        self._at_once = at_once
        self._calls = calls
        self._checked = type(norm).forward is _BatchNorm.forward

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the batch norm returns."""
        norm = self.norm
        if not norm.training or not norm.track_running_stats or norm.running_mean is None:
            return cast(Tensor, norm(*args, **kwargs))
        twin = _twin(norm)
        outputs = cast(Tensor, twin(*args, **kwargs))
        x = args[0] if args else kwargs["input"]
        if not self._checked:
            self._check(outputs, args, kwargs)
        if not getattr(_here, "again", False):
            mean, variance, _ = _statistics(twin)
            calls = self._calls.setdefault(current_microbatch(), [])
            calls.append((x.numel() // x.shape[1], mean, variance))
        return outputs

    def __deepcopy__(self, memo: dict[int, Any]) -> Noted:
        """Return one that calls a copy of the batch norm, and notes in the same place."""
        made = copy.copy(self)
        made._modules = {"norm": copy.deepcopy(self.norm, memo)}
        return made

    def start(self) -> None:
        """Begin a batch, and forget what one that failed has left."""
        self._calls.clear()

    def finish(self) -> None:
        """Let what was noted count in the running statistics."""
        calls = [call for m in sorted(self._calls) for call in self._calls[m]]
        self._calls.clear()
        for count, mean, variance in [_joined(calls)] if calls and self._at_once else calls:
            running_mean, running_variance, seen = _statistics(self.norm)
            if count < 2:
                continue
            tracked = int(seen) + 1
            share = 1.0 / tracked if self.norm.momentum is None else self.norm.momentum
            for buffer, value in ((running_mean, mean), (running_variance, variance)):
                # As the kernel does: autograd, which may have saved the buffer, is not to know.
                buffer.data.mul_(1.0 - share).add_(value.to(buffer), alpha=share)
            seen.data.fill_(tracked)

    def _check(self, outputs: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise InputError if a batch norm of the user's own computes with its running statistics in training."""
        with torch.no_grad():
            other = _twin(self.norm)
            other.momentum = self.norm.momentum
            for statistic in _statistics(other)[:2]:
                statistic.mul_(2.0).add_(1.0)
            if not torch.equal(outputs, other(*args, **kwargs)):
                raise InputError(
                    f"{type(self.norm).__name__} computes with its running statistics in training, which neither "
                    "replicas of a stage nor deferred_batch_norm=True can keep up to date: do without them"
                )
        self._checked = True


def _twin(norm: _BatchNorm) -> _BatchNorm:
    """Return the same module with running statistics of its own, which will be those of its next call alone."""
    made = copy.copy(norm)
    made._buffers = {name: None if b is None else b.detach().clone() for name, b in norm._buffers.items()}
    made.momentum = 1.0
    for kind in (kind for kind in HOOKS if norm.__dict__[kind]):
        made.__dict__[kind] = OrderedDict((key, _as_of(norm, hook)) for key, hook in norm.__dict__[kind].items())
    return made


def _as_of(norm: _BatchNorm, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook of a twin that is called as one of the batch norm itself."""

    @wraps(hook)
    def called(_: nn.Module, *args: Any) -> Any:
        return hook(norm, *args)

    return called


def _statistics(norm: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Return the buffers: mean, variance, and how many batches they are of."""
    return cast("tuple[Tensor, Tensor, Tensor]", (norm.running_mean, norm.running_var, norm.num_batches_tracked))


def _joined(calls: Sequence[Statistics]) -> Statistics:
    """Return the statistics of all calls as one, without loss of digits (Chan, Golub and LeVeque 1983)."""
    count, mean, variance = calls[0]
    squares = variance * (count - 1)
    for more, other, spread in calls[1:]:
        total = count + more
        shift = other.to(mean) - mean
        squares = squares + spread.to(mean) * (more - 1) + shift.square() * (count * more / total)
        mean, count = mean + shift * (more / total), total
    return count, mean, squares / max(1, count - 1)


@contextmanager
def count_as_one_batch(norms: Sequence[Noted]) -> Iterator[None]:
    """Count what passes in the block as one batch; a block that fails counts for nothing."""
    for norm in norms:
        norm.start()
    yield
    for norm in norms:
        norm.finish()


@contextmanager
def note_nothing() -> Iterator[None]:
    """Note nothing of what this thread runs again."""
    before = getattr(_here, "again", False)
    _here.again = True
    try:
        yield
    finally:
        _here.again = before
