"""Reducer: adds gradients over the ranks of one group by a hook, in buckets, some of them while stages still run."""

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
    """Adds the gradients of one group of ranks, step by step. What its hook keeps stays from step to step.

    In a step `begin` is called for gradients that are complete, any number of times, `finish` once, and then `settle`.
    All ranks of the group make the same calls with the same parameters in the same order. Where `is_plain` says so, on
    all ranks, the gradients of a step are added as they are, and the hook does not see them.
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
        # Hooks know a bucket by its number, so it has one for as long as it holds the same parameters. Those are kept:
        # the identity of one that is gone may be another one's.
        self._numbers: Numbers = {}
        self._under_way: list[tuple[Bucket, Any]] = []
        self._begun: dict[Tensor, bool] = {}
        self.bind(group)

    def bind(self, group: dist.ProcessGroup | None) -> None:
        """Add over the ranks of a group, which is made anew after a failure."""
        self._group = group
        for hook in (self.hook, self._plain):
            hook.bind(group)

    @property
    def residuals(self) -> ErrorFeedback | None:
        """What the hook has left out so far, where it is one of ours that leaves something out."""
        found = getattr(self.hook.state, "residuals", None)
        return found if isinstance(found, ErrorFeedback) else None

    @cached_property
    def left_out(self) -> ErrorFeedback | PowerErrors | None:
        """What the hook has left out so far, parameter by parameter; None for a hook that does not say."""
        state = self.hook.state
        if isinstance(state, PowerSGDState) and state.use_error_feedback:
            return PowerErrors(state, self._numbers)
        return self.residuals

    def has_begun(self, parameter: Tensor) -> bool:
        """Return whether the gradient of a parameter is under way in this step."""
        return parameter in self._begun

    def begin(self, offers: Sequence[GradientOffer], weight: float = 1.0) -> None:
        """Begin to add gradients that nothing more is added to in this step, by a hook that does it in the background.

        One that no rank has is sent as zeros: who has one is told at the end.
        """
        self._begun.update((parameter, gradient is not None) for parameter, gradient in offers)
        self._start(offers, weight)

    def finish(self, offers: Sequence[GradientOffer], weight: float = 1.0) -> dict[Tensor, Tensor]:
        """Return the mean of all ranks' gradients, each times its `weight`, by parameter, as the hook computes it.

        offers: all parameters, those that were begun among them, with the gradients that are not under way. A parameter
            without a gradient on any rank has none. weight: for means over rows, rows of this rank * ranks / all rows.
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
                # Those that were begun come first.
                if n_early >= 0 and parameter not in wanted:
                    continue
                earlier = found.get(parameter)
                found[parameter] = gradient if earlier is None else earlier + gradient
        self._under_way.clear()
        self._begun.clear()
        self.traffic.steps += 1
        return found

    def settle(self, *, kept: bool) -> None:
        """End a step. `kept`: whether its gradients were applied; otherwise nothing of it is left."""
        self._under_way.clear()
        self._begun.clear()
        if self.left_out is not None:
            self.left_out.settle(kept=kept)

    def _start(self, offers: Sequence[GradientOffer], weight: float, *, last: bool = False) -> None:
        """Begin buckets with these gradients. `last`: whether no others come in this step."""
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
                # A hook that waits in a callback keeps a thread of gloo, which has two: with two buckets none is left.
                self._wait(bucket, future)
                future = None
            self._under_way.append((bucket, future))
            self.traffic.note(whole.nbytes, hook.count(hook.state, whole))

    def _find_number(self, bucket: Bucket) -> int:
        key = tuple(map(id, bucket.parameters()))
        return self._numbers.setdefault(key, (len(self._numbers), bucket.parameters()))[0]

    @staticmethod
    def _wait(bucket: Bucket, future: Any) -> None:
        """Wait for what the hook has begun, if that is not over, and put it into the bucket."""
        if future is not None:
            found = future.wait()
            # Some hooks give a list of one tensor, as collectives do.
            bucket.set_buffer(found[0] if isinstance(found, (list, tuple)) else found)

    def _tell(self, offers: Sequence[GradientOffer]) -> tuple[list[bool], list[bool]]:
        """Return which parameters had a gradient on some rank that was begun, and which have one that was not.

        Which do may follow from the rows that a rank was given.
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
    """Return a gradient times a weight, or nothing where the weight is zero: it may be no number then, as 0 / 0."""
    return None if gradient is None or not weight else gradient * weight
