"""Keep batch norms from writing their running statistics while microbatches run, and update the statistics later.

With deferred batch norm, the statistics change once per batch instead of once per microbatch. With replicas of a stage,
microbatches run at the same time, in no fixed order. In both cases a DeferredBatchNorm replaces the layer. It records
each call's batch statistics, and updates the running statistics at the end of the batch: once with the merged
statistics of all calls, or once per call in the order of microbatches.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fxsplit.errors import InputError
from fxsplit.torch_internals.nn.containers import HOOKS
from fxsplit.torch_internals.random.seeded_calls import current_microbatch
from fxsplit.torch_internals.scopes.undo import restore_after
from fxsplit.torch_internals.tensors import accelerators
from fxsplit.torch_internals.torch_compile.runs_uncompiled import RunsUncompiled

_thread = threading.local()

Statistics = tuple[int, Tensor, Tensor]
"""The statistics of one call: the number of values per channel, their mean, and their variance (divided by n - 1)."""

Calls = dict[int, list[Statistics]]
"""The recorded calls, by microbatch."""


def is_batch_norm(module: Any) -> TypeGuard[_BatchNorm]:
    """Return whether a module is a batch norm of any dimension, including SyncBatchNorm and lazy batch norms."""
    return isinstance(module, _BatchNorm)


class DeferredBatchNorm(RunsUncompiled):
    """Calls a batch norm without changing its running statistics, and records the updates for `finish`.

    norm: the batch norm.
    at_once: whether the statistics change once per batch instead of once per call.
    calls: the record of calls, shared by the replicas of a stage.
    """

    def __init__(self, norm: _BatchNorm, at_once: bool, calls: Calls) -> None:
        super().__init__()
        self.norm = norm
        self._at_once = at_once
        self._calls = calls
        # torch's own forward does not read running statistics in training; a subclass's forward is checked.
        self._checked = type(norm).forward is _BatchNorm.forward

    @property
    def idle(self) -> bool:
        """Whether the batch norm writes no running statistics."""
        return not self.norm.training or not self.norm.track_running_stats or self.norm.running_mean is None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call the batch norm. Raises InputError if its output in training depends on its running statistics."""
        norm = self.norm
        if self.idle:
            return cast(Tensor, norm(*args, **kwargs))
        twin = _copy_with_own_statistics(norm)
        outputs = cast(Tensor, twin(*args, **kwargs))
        x = args[0] if args else kwargs["input"]
        if not self._checked:
            self._check(outputs, args, kwargs)
        # A recomputed forward has the same statistics, which its first run has recorded.
        if not getattr(_thread, "mute", False):
            mean, variance, _ = _get_statistics(twin)
            calls = self._calls.setdefault(current_microbatch(), [])
            calls.append((x.numel() // x.shape[1], mean, variance))
        return outputs

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredBatchNorm:
        """Return a copy for a replica, which shares this module's record of calls."""
        # A shallow copy, so that the dictionary of calls is shared.
        made = copy.copy(self)
        made._modules = {"norm": copy.deepcopy(self.norm, memo)}
        return made

    def start(self) -> None:
        """Begin a batch, and discard the calls of a failed batch."""
        self._calls.clear()

    def take_calls(self) -> list[tuple[int, Statistics]]:
        """Return the recorded calls, each with its microbatch, and clear the record."""
        found = [(m, call) for m in sorted(self._calls) for call in self._calls[m]]
        self._calls.clear()
        return found

    def add_calls(self, calls: Sequence[tuple[int, Statistics]]) -> None:
        """Record calls of another process, which runs other microbatches than this process."""
        for microbatch, call in calls:
            self._calls.setdefault(microbatch, []).append(call)

    def finish(self) -> None:
        """Update the running statistics with the recorded calls, in the order of microbatches, and clear the record."""
        calls = [call for m in sorted(self._calls) for call in self._calls[m]]
        # Copies of one layer may share a record, and only the first `finish` may apply it.
        self._calls.clear()
        # Workers computed the statistics on their own streams.
        accelerators.hand_over(value for _, *made in calls for value in made)
        for count, mean, variance in [merge_statistics(calls)] if calls and self._at_once else calls:
            running_mean, running_variance, seen = _get_statistics(self.norm)
            if count < 2:  # the variance of a single value is NaN
                continue
            # Write through `.data`, as the kernel does: a backward may have saved the buffer, and must not see a new
            # version.
            seen.data.add_(1)
            momentum = self.norm.momentum
            # Keep the count on its device: reading it would make the host wait for everything queued on an accelerator.
            share = seen.data.double().reciprocal() if momentum is None else momentum
            for buffer, value in ((running_mean, mean), (running_variance, variance)):
                buffer.data.mul_(1.0 - share).add_(value.to(buffer) * share)

    def _check(self, outputs: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise InputError if the outputs of a user's own batch norm depend on its running statistics.

        outputs: the outputs of the call with these arguments.
        """
        # Compare with very different running statistics.
        with torch.no_grad():
            other = _copy_with_own_statistics(self.norm)
            other.momentum = self.norm.momentum
            for statistic in _get_statistics(other)[:2]:
                statistic.mul_(2.0).add_(1.0)
            if not torch.equal(outputs, other(*args, **kwargs)):
                raise InputError(
                    f"{type(self.norm).__name__} computes with its running statistics in training, and neither "
                    "replicas of a stage nor deferred_batch_norm=True can keep them up to date: compile without both"
                )
        self._checked = True


def _copy_with_own_statistics(norm: _BatchNorm) -> _BatchNorm:
    """Return a copy of a batch norm that shares its parameters, but not its statistics.

    After a call, the statistics of the copy are the statistics of only this call.
    """
    made = copy.copy(norm)
    made._buffers = {name: None if b is None else b.detach().clone() for name, b in norm._buffers.items()}
    made.momentum = 1.0  # all of the new value, nothing of the old
    for kind in (kind for kind in HOOKS if norm.__dict__[kind]):
        made.__dict__[kind] = OrderedDict((key, _bind_hook(norm, hook)) for key, hook in norm.__dict__[kind].items())
    return made


def _bind_hook(norm: _BatchNorm, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook for a copy of `norm`, so that the user's hook receives `norm` itself, which it may keep."""

    @wraps(hook)
    def called(_: nn.Module, *args: Any) -> Any:
        return hook(norm, *args)

    return called


def _get_statistics(norm: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Return the buffers of a batch norm: mean, variance, and the number of batches seen."""
    return cast("tuple[Tensor, Tensor, Tensor]", (norm.running_mean, norm.running_var, norm.num_batches_tracked))


def merge_statistics(calls: Sequence[Statistics]) -> Statistics:
    """Return the statistics of several calls together, as if one call had seen all their values.

    Means and squared deviations are updated call by call, which keeps full precision; sums of squares would not (Chan,
    Golub and LeVeque, "Algorithms for computing the sample variance", 1983).
    """
    count, mean, variance = calls[0]
    squares = variance * (count - 1)
    for more, other_mean, other_variance in calls[1:]:
        total = count + more
        shift = other_mean.to(mean) - mean
        squares = squares + other_variance.to(mean) * (more - 1) + shift.square() * (count * more / total)
        mean, count = mean + shift * (more / total), total
    return count, mean, squares / max(1, count - 1)


@contextmanager
def count_as_one_batch(norms: Sequence[DeferredBatchNorm]) -> Iterator[None]:
    """Treat all calls in the block as one batch. A block that raises changes no statistics."""
    for norm in norms:
        norm.start()
    yield
    for norm in norms:
        norm.finish()


@contextmanager
def note_nothing() -> Iterator[None]:
    """Inside the block, record no calls of this thread.

    Use it when a stage recomputes a forward that has been recorded.
    """
    with restore_after(partial(setattr, _thread, "mute", getattr(_thread, "mute", False))):
        _thread.mute = True
        yield
