"""The reducer: adds gradients over the ranks of one group by a hook, in buckets, some while stages still run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from fxsplit.runtime.ranks.gradients.bytes_sent import BytesSent
from fxsplit.runtime.ranks.hooks.buckets import BUCKET_BYTES, Bucket, GradientOffer, fill_buckets
from fxsplit.runtime.ranks.hooks.error_feedback import ErrorFeedback
from fxsplit.runtime.ranks.hooks.hooks import Hook, HookChoice
from fxsplit.runtime.ranks.hooks.power_errors import PowerErrors
from fxsplit.torch_internals.distributed.process_groups import lend

Numbers = dict[tuple[int, ...], tuple[int, list[Tensor]]]


class Reducer:
    """Adds the gradients of one group of ranks, step by step. The hook keeps its state from step to step.

        begin(complete gradients) ... begin(...)   -->   finish(the rest)   -->   settle(kept)

    In a step, `begin` is called any number of times for complete gradients, then `finish` once, then `settle`. All
    ranks of the group make the same calls with the same parameters in the same order.

    is_plain: returns whether this step's gradients bypass the hook and are sent uncompressed; it agrees on all ranks.
    """

    def __init__(
        self,
        hook: Hook,
        group: dist.ProcessGroup | None = None,
        *,
        bucket_bytes: float = BUCKET_BYTES,
        traffic: BytesSent | None = None,
        is_plain: Callable[[], bool] = lambda: False,
    ) -> None:
        self.hook = hook
        self._plain = HookChoice().make()
        self._is_plain = is_plain
        self.traffic = BytesSent() if traffic is None else traffic
        self._bucket_bytes = bucket_bytes
        # Hooks know a bucket by its number, so a bucket with the same parameters keeps its number. Keep the parameters:
        # a new object could have the id of one that is gone.
        self._numbers: Numbers = {}
        self._under_way: list[tuple[Bucket, Any]] = []
        self._begun: dict[Tensor, bool] = {}
        self.bind(group)

    def bind(self, group: dist.ProcessGroup | None) -> None:
        """Use this process group from now on. A failure replaces the groups."""
        self._group = group
        for hook in (self.hook, self._plain):
            hook.bind(group)

    @property
    def residuals(self) -> ErrorFeedback | None:
        """The compression errors that one of fxsplit's own hooks keeps, else None."""
        found = getattr(self.hook.state, "residuals", None)
        return found if isinstance(found, ErrorFeedback) else None

    @cached_property
    def left_out(self) -> ErrorFeedback | PowerErrors | None:
        """The compression errors by parameter (None: the hook keeps none, or does not give access to them)."""
        state = self.hook.state
        if isinstance(state, PowerSGDState) and state.use_error_feedback:
            return PowerErrors(state, self._numbers)
        return self.residuals

    def has_begun(self, parameter: Tensor) -> bool:
        """Return whether the reduction of a parameter's gradient has begun in this step."""
        return parameter in self._begun

    def begin(self, offers: Sequence[GradientOffer], weight: float = 1.0) -> None:
        """Begin to add gradients over the ranks, in the background. The gradients must be complete for this step.

        offers: parameters, each with its gradient on this rank, or None. A rank without a gradient sends zeros, and
            `finish` leaves out parameters without a gradient on any rank.
        weight: the factor of this rank's gradients, as for `finish`.
        """
        self._begun.update((parameter, gradient is not None) for parameter, gradient in offers)
        self._start(offers, weight)

    def finish(self, offers: Sequence[GradientOffer], weight: float = 1.0) -> dict[Tensor, Tensor]:
        """Return, by parameter, the mean over all ranks of the gradients times `weight`, as the hook computes it.

        offers: all parameters, including those that were begun, with the gradients that were not begun. A parameter
            without a gradient on any rank has no entry in the result.
        weight: for means over rows, this rank's rows * ranks / all rows.
        """
        early, late = self._tell(offers)
        self._start([offer for offer, there in zip(offers, late, strict=True) if there], weight, last=True)
        found: dict[Tensor, Tensor] = {}
        wanted = {p for (p, _), there in zip(offers, early, strict=True) if there}
        n_early = len(self._begun)
        for bucket, future in self._under_way:
            self._wait(bucket, future)
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                n_early -= 1
                # Gradients that were begun come first.
                if n_early >= 0 and parameter not in wanted:
                    continue
                earlier = found.get(parameter)
                found[parameter] = gradient if earlier is None else earlier + gradient
        self._under_way.clear()
        self._begun.clear()
        self.traffic.steps += 1
        return found

    def settle(self, *, kept: bool) -> None:
        """End a step. `kept`: whether its gradients were applied.

        Otherwise the step leaves no trace in the hook's state.
        """
        self._under_way.clear()
        self._begun.clear()
        if self.left_out is not None:
            self.left_out.settle(kept=kept)

    def _start(self, offers: Sequence[GradientOffer], weight: float, *, last: bool = False) -> None:
        """Put gradients into buckets and begin to add each bucket over the ranks.

        `last`: no more buckets come in this step.
        """
        scaled = [GradientOffer(p, scale(g, weight)) for p, g in offers]
        buckets = fill_buckets(scaled, self._bucket_bytes)
        hook = self._plain if self._is_plain() else self.hook
        if isinstance(self.left_out, PowerErrors):
            self.left_out.begin()
        for bucket in buckets:
            number = self._find_number(bucket)
            bucket.set_place(number, last=last and bucket is buckets[-1])
            if isinstance(self.left_out, PowerErrors):
                self.left_out.prepare(number, bucket)
            whole = bucket.buffer()
            lend(whole)
            future = hook.function(hook.state, bucket)
            if not hook.overlaps:
                # A hook that waits in a callback occupies one of gloo's two threads, so two buckets would block both.
                self._wait(bucket, future)
                future = None
            self._under_way.append((bucket, future))
            self.traffic.note(whole.nbytes, hook.count(hook.state, whole))

    def _find_number(self, bucket: Bucket) -> int:
        key = tuple(map(id, bucket.parameters()))
        return self._numbers.setdefault(key, (len(self._numbers), bucket.parameters()))[0]

    @staticmethod
    def _wait(bucket: Bucket, future: Any) -> None:
        """Wait for a hook's future, and put its result into the bucket."""
        if future is not None:
            found = future.wait()
            # Some hooks return a list of one tensor, as collectives do.
            bucket.set_buffer(found[0] if isinstance(found, (list, tuple)) else found)

    def _tell(self, offers: Sequence[GradientOffer]) -> tuple[list[bool], list[bool]]:
        """Return two flags for each parameter, combined over all ranks.

        The first says whether a rank has begun its gradient, the second whether a rank has a gradient that was not
        begun. Ranks must exchange them, since the gradients that exist may depend on a rank's rows.
        """
        if not offers:
            return [], []
        flags = [[self._begun.get(p, False) for p, _ in offers], [g is not None for _, g in offers]]
        own = torch.tensor(flags, dtype=torch.uint8, device=offers[0].parameter.device)
        lend(own)
        dist.all_reduce(own, dist.ReduceOp.MAX, group=self._group)
        early, late = own.bool().tolist()
        return early, late


def scale(gradient: Tensor | None, weight: float) -> Tensor | None:
    """Return a gradient times a weight.

    Returns None for weight zero, since the gradient may then be NaN, from 0 / 0.
    """
    return None if gradient is None or not weight else gradient * weight
