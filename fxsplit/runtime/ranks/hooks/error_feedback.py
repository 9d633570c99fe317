"""ErrorFeedback: what compression has left out of gradients so far, kept for each parameter and added the next time.

So nothing is lost: over any number of steps, what was applied and what is left are together the sum of all gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxsplit.runtime.ranks.hooks.buckets import Bucket


class ErrorFeedback:
    """Of each parameter what is left of this rank's gradients. Buckets may hold other parameters in each step.

    What a step has left out counts once the step is over: one that fails changes nothing.
    """

    def __init__(self) -> None:
        # By identity, with the parameter itself: the number of one that is gone may be another one's.
        self._left: dict[int, tuple[Tensor, Tensor]] = {}
        self._next: dict[int, tuple[Tensor, Tensor]] = {}

    def add_to(self, bucket: Bucket) -> Tensor:
        """Return a bucket's gradients with what is left of earlier ones, as a new tensor."""
        whole = bucket.buffer().clone()
        for parameter, part in zip(bucket.parameters(), self._cut(bucket, whole), strict=True):
            kept = self._left.get(id(parameter))
            if kept is not None:
                part += kept[1]
        return whole

    def keep(self, bucket: Bucket, left: Tensor) -> None:
        """Keep what is left of a bucket, in the place of what was left before, if the step comes to its end."""
        for parameter, part in zip(bucket.parameters(), self._cut(bucket, left), strict=True):
            self._next[id(parameter)] = parameter, part.clone()

    def settle(self, *, kept: bool) -> None:
        """End a step. `kept`: whether its gradients were applied, so that what it has left out counts."""
        if kept:
            self._left |= self._next
        self._next.clear()

    def get(self, parameter: Tensor) -> Tensor:
        """Return what is left of the gradients of a parameter, in its shape."""
        kept = self._left.get(id(parameter))
        return torch.zeros_like(parameter) if kept is None else kept[1].view(parameter.shape)

    def has(self, parameter: Tensor) -> bool:
        """Return whether anything of a parameter was left out so far."""
        return id(parameter) in self._left

    def put(self, parameter: Tensor, left: Tensor) -> None:
        """Let this be what is left of the gradients of a parameter."""
        self._left[id(parameter)] = parameter, left.reshape(-1)

    def clear(self) -> None:
        """Forget all that is left."""
        self._left.clear()
        self._next.clear()

    def _cut(self, bucket: Bucket, flat: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.split(flat, [parameter.numel() for parameter in bucket.parameters()]))
