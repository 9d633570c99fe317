"""Error feedback: keep the part of each gradient that compression drops, and add it to the next step's gradient.

    step t:   gradient + error(t-1)  -->  compress  -->  applied(t)
                                            '-->  error(t) = the rest, kept for step t+1

So nothing is lost: over any number of steps, applied gradients and the remaining error add up to all gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxsplit.runtime.ranks.hooks.buckets import Bucket


class ErrorFeedback:
    """The compression error of each parameter on this rank. Buckets may group parameters differently in each step.

    The errors of a step become valid only after the step has succeeded.
    """

    def __init__(self) -> None:
        # By id(), with the parameter itself: a new object could have the id of one that is gone.
        self._left: dict[int, tuple[Tensor, Tensor]] = {}
        self._next: dict[int, tuple[Tensor, Tensor]] = {}

    def add_to(self, bucket: Bucket) -> Tensor:
        """Return a bucket's gradients plus the errors of earlier steps, as a new tensor."""
        whole = bucket.buffer().clone()
        for parameter, part in zip(bucket.parameters(), self._cut(bucket, whole), strict=True):
            kept = self._left.get(id(parameter))
            if kept is not None:
                part += kept[1]
        return whole

    def keep(self, bucket: Bucket, left: Tensor) -> None:
        """Record the errors of a bucket, given as one flat tensor.

        They replace the earlier errors if the step succeeds.
        """
        for parameter, part in zip(bucket.parameters(), self._cut(bucket, left), strict=True):
            self._next[id(parameter)] = parameter, part.clone()

    def settle(self, *, kept: bool) -> None:
        """End a step. `kept`: whether its gradients were applied.

        If so, its errors become valid, else they are dropped.
        """
        if kept:
            self._left |= self._next
        self._next.clear()

    def get(self, parameter: Tensor) -> Tensor:
        """Return the error of a parameter's gradients, in the parameter's shape (zeros: no error so far)."""
        kept = self._left.get(id(parameter))
        return torch.zeros_like(parameter) if kept is None else kept[1].view(parameter.shape)

    def has(self, parameter: Tensor) -> bool:
        """Return whether a parameter has an error so far."""
        return id(parameter) in self._left

    def put(self, parameter: Tensor, left: Tensor) -> None:
        """Set the error of a parameter's gradients."""
        self._left[id(parameter)] = parameter, left.reshape(-1)

    def clear(self) -> None:
        """Forget all compression errors."""
        self._left.clear()
        self._next.clear()

    def _cut(self, bucket: Bucket, flat: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.split(flat, [parameter.numel() for parameter in bucket.parameters()]))
