"""Batch norm's running statistics, where a batch norm cannot write them as microbatches pass.

They may have to change once a batch instead of once a microbatch (deferred batch norm). Or replicas of the layer's
stage may pass microbatches at the same time, in no fixed order. In both cases a DeferredBatchNorm takes the batch
norm's place. It notes what the layer would have written, and writes at the end of the batch: one change by all that
the layer saw, or the changes of one microbatch after another.
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
"""Of one call: how many values each channel had, their mean, and their variance as of a sample (divided by n - 1)."""

Calls = dict[int, list[Statistics]]
"""The calls that were noted, by microbatch."""


def is_batch_norm(module: Any) -> TypeGuard[_BatchNorm]:
    """Return whether a module is a batch norm of any number of dimensions, SyncBatchNorm and lazy ones included."""
    return isinstance(module, _BatchNorm)


class DeferredBatchNorm(RunsUncompiled):
    """Calls a batch norm without changing its running statistics, and notes their changes for `finish`.

    norm: the batch norm. at_once: whether its statistics change once a batch, and not once a microbatch. calls: where
    its calls are noted, which the Noteds of replicas share.
    """

    def __init__(self, norm: _BatchNorm, at_once: bool, calls: Calls) -> None:
        super().__init__()
        self.norm = norm
        self._at_once = at_once
        self._calls = calls
        # torch's own forward is known to compute without running statistics in training, a subclass's is not.
        self._checked = type(norm).forward is _BatchNorm.forward

    @property
    def idle(self) -> bool:
        """Whether the batch norm writes no running statistics."""
        return not self.norm.training or not self.norm.track_running_stats or self.norm.running_mean is None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the batch norm returns; raises InputError if that depends on running statistics in training."""
        norm = self.norm
        if self.idle:
            return cast(Tensor, norm(*args, **kwargs))
        twin = _copy_with_own_statistics(norm)
        outputs = cast(Tensor, twin(*args, **kwargs))
        x = args[0] if args else kwargs["input"]
        if not self._checked:
            self._check(outputs, args, kwargs)
        # The statistics of a recomputed forward are those of the first one, which has noted them.
        if not getattr(_thread, "mute", False):
            mean, variance, _ = _get_statistics(twin)
            calls = self._calls.setdefault(current_microbatch(), [])
            calls.append((x.numel() // x.shape[1], mean, variance))
        return outputs

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredBatchNorm:
        """Return a copy, as a replica has it, which notes in the same place as this one."""
        # Shallow: the dictionary of notes is to be shared with the copy.
        made = copy.copy(self)
        made._modules = {"norm": copy.deepcopy(self.norm, memo)}
        return made

    def start(self) -> None:
        """Begin a batch, and forget what a failed batch has left."""
        self._calls.clear()

    def take_calls(self) -> list[tuple[int, Statistics]]:
        """Return the calls that were noted, each with its microbatch, and forget them."""
        found = [(m, call) for m in sorted(self._calls) for call in self._calls[m]]
        self._calls.clear()
        return found

    def add_calls(self, calls: Sequence[tuple[int, Statistics]]) -> None:
        """Note calls of another process, whose microbatches are others than those of this one."""
        for microbatch, call in calls:
            self._calls.setdefault(microbatch, []).append(call)

    def finish(self) -> None:
        """Let what was noted count in the running statistics, by microbatch, and forget the notes."""
        calls = [call for m in sorted(self._calls) for call in self._calls[m]]
        # The Noteds of one layer may share their notes, and only the first of them may count the notes.
        self._calls.clear()
        # Workers have made them, on streams of their own.
        accelerators.hand_over(value for _, *made in calls for value in made)
        for count, mean, variance in [merge_statistics(calls)] if calls and self._at_once else calls:
            running_mean, running_variance, seen = _get_statistics(self.norm)
            if count < 2:  # the variance of a single value is not a number
                continue
            # By `.data`, as the kernel does: a backward may have saved the buffer, and must not see a new version.
            seen.data.add_(1)
            momentum = self.norm.momentum
            # How often is not asked for: a host that reads it from an accelerator waits for all that runs there.
            share = seen.data.double().reciprocal() if momentum is None else momentum
            for buffer, value in ((running_mean, mean), (running_variance, variance)):
                buffer.data.mul_(1.0 - share).add_(value.to(buffer) * share)

    def _check(self, outputs: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise InputError if a user's own batch norm gives other outputs with other running statistics."""
        # Running statistics that are quite different must not change the outputs.
        with torch.no_grad():
            other = _copy_with_own_statistics(self.norm)
            other.momentum = self.norm.momentum
            for statistic in _get_statistics(other)[:2]:
                statistic.mul_(2.0).add_(1.0)
            if not torch.equal(outputs, other(*args, **kwargs)):
                raise InputError(
                    f"{type(self.norm).__name__} computes with its running statistics in training, which neither "
                    "replicas of a stage nor deferred_batch_norm=True can keep up to date: do without them"
                )
        self._checked = True


def _copy_with_own_statistics(norm: _BatchNorm) -> _BatchNorm:
    """Return the same layer, with the same parameters, whose statistics after a call are those of that call alone."""
    made = copy.copy(norm)
    made._buffers = {name: None if b is None else b.detach().clone() for name, b in norm._buffers.items()}
    made.momentum = 1.0  # all of the new value, nothing of the old one
    for kind in (kind for kind in HOOKS if norm.__dict__[kind]):
        made.__dict__[kind] = OrderedDict((key, _bind_hook(norm, hook)) for key, hook in norm.__dict__[kind].items())
    return made


def _bind_hook(norm: _BatchNorm, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook for a copy of `norm` that gives `norm` to the user's hook, which may keep what it is given."""

    @wraps(hook)
    def called(_: nn.Module, *args: Any) -> Any:
        return hook(norm, *args)

    return called


def _get_statistics(norm: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Return three buffers: the mean, the variance, and how many batches they are of."""
    return cast("tuple[Tensor, Tensor, Tensor]", (norm.running_mean, norm.running_var, norm.num_batches_tracked))


def merge_statistics(calls: Sequence[Statistics]) -> Statistics:
    """Return the statistics of the values of all calls together, at least one.

    Means and squared deviations are updated call by call, which loses no digits (Chan, Golub and LeVeque, "Algorithms
    for computing the sample variance", 1983); sums of squares would.
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
    """Count what passes in the block as one batch; a block that raises changes no statistics."""
    for norm in norms:
        norm.start()
    yield
    for norm in norms:
        norm.finish()


@contextmanager
def note_nothing() -> Iterator[None]:
    """Note no calls of this thread in the block: a stage that recomputes its forward has been noted already."""
    with restore_after(partial(setattr, _thread, "mute", getattr(_thread, "mute", False))):
        _thread.mute = True
        yield
