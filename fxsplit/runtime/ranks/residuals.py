"""Residuals: what compression has left out of gradients so far, kept for each parameter and added the next time.

So nothing is lost: over any number of steps, what was applied and what is left are together the sum of all gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxsplit.runtime.ranks.buckets import Bucket


class Residuals:
    """Of each parameter what is left of this rank's gradients. Buckets may hold other parameters in each step."""

    def __init__(self) -> None:
        # By identity, with the parameter itself: the number of one that is gone may be another one's.
        self._left: dict[int, tuple[Tensor, Tensor]] = {}

    def add_to(self, bucket: Bucket) -> Tensor:
        """Return a bucket's gradients with what is left of earlier ones, as a new tensor."""
        whole = bucket.buffer().clone()
        for parameter, part in zip(bucket.parameters(), self._cut(bucket, whole), strict=True):
            kept = self._left.get(id(parameter))
            if kept is not None:
                part += kept[1]
        return whole

    def keep(self, bucket: Bucket, left: Tensor) -> None:
        """Keep what is left of a bucket, in the place of what was left before."""
        for parameter, part in zip(bucket.parameters(), self._cut(bucket, left), strict=True):
            self._left[id(parameter)] = parameter, part.clone()

    def get(self, parameter: Tensor) -> Tensor:
        """Return what is left of the gradients of a parameter, in its shape."""
        kept = self._left.get(id(parameter))
        return torch.zeros_like(parameter) if kept is None else kept[1].view(parameter.shape)

    def _cut(self, bucket: Bucket, flat: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.split(flat, [parameter.numel() for parameter in bucket.parameters()]))


class Traffic:
    """Bytes that one rank has sent, and those that it would have sent of whole gradients."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.whole_bytes = 0

    def note(self, whole: Tensor, *sent: Tensor) -> None:
        """Count what was sent in place of a tensor."""
        self.whole_bytes += whole.nbytes
        self.sent_bytes += sum(one.nbytes for one in sent)

    def __str__(self) -> str:
        share = self.sent_bytes / self.whole_bytes if self.whole_bytes else 1.0
        return f"{self.sent_bytes} bytes sent in place of {self.whole_bytes} ({100 * (1 - share):.1f} % saved)"
