"""Buckets: the gradients of several parameters in one flat tensor, as torch's communication hooks for DDP expect them.

A hook takes a state and a bucket, and returns a future of the mean of all ranks' buffers. torch's own `dist.GradBucket`
cannot be constructed in Python; this class has the same methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fxsplit.errors import InputError

BUCKET_BYTES = 25_000_000
"""The size of a bucket in bytes, as in DDP. Larger buckets start later; smaller buckets mean more messages."""


class GradientOffer(NamedTuple):
    """A parameter, and this rank's gradient for it (None: no gradient)."""

    parameter: Tensor
    gradient: Tensor | None


class Bucket:
    """Gradients of parameters in one flat tensor. `index` is the bucket's number in the step."""

    def __init__(self, index: int, offers: Sequence[GradientOffer], last: bool) -> None:
        self._index, self._last = index, last
        self._parameters = [offer.parameter for offer in offers]
        # Another rank may have a gradient that this rank lacks: add zeros.
        pieces = [torch.zeros_like(p) if g is None else g for p, g in offers]
        self._buffer = torch.cat([piece.reshape(-1) for piece in pieces])

    def set_place(self, index: int, *, last: bool) -> None:
        """Set the bucket's number, and whether it is the last of a step."""
        self._index, self._last = index, last

    def index(self) -> int:
        """Return the bucket's number in the step."""
        return self._index

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the step."""
        return self._last

    def buffer(self) -> Tensor:
        """Return all gradients as one flat tensor."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the gradients by another flat tensor of the same length."""
        self._buffer = buffer

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of their gradients."""
        return self._parameters

    def gradients(self) -> list[Tensor]:
        """Return the gradients in the shapes of their parameters, as views of the buffer."""
        found, at = [], 0
        for parameter in self._parameters:
            found.append(self._buffer[at : at + parameter.numel()].view(parameter.shape))
            at += parameter.numel()
        return found


def fill_buckets(offers: Iterable[GradientOffer], bucket_bytes: float = BUCKET_BYTES) -> list[Bucket]:
    """Return buckets that hold all gradients, in order. Each bucket has one dtype and device.

    All ranks pass the same parameters in the same order. Raises InputError for a sparse gradient.
    """
    groups: list[list[GradientOffer]] = []
    room = 0.0
    for offer in offers:
        parameter, gradient = offer
        if gradient is not None and gradient.layout is not torch.strided:
            raise InputError(
                f"a gradient of shape {list(gradient.shape)} is {str(gradient.layout).removeprefix('torch.')}, which "
                "no hook takes: make it dense (sparse=False of the embedding)"
            )
        own = groups[-1][0].parameter if groups else parameter
        alike = own.dtype == parameter.dtype and own.device == parameter.device
        # A gradient larger than a bucket gets a bucket of its own.
        if not groups or not alike or room < parameter.nbytes:
            groups.append([])
            room = bucket_bytes
        groups[-1].append(offer)
        room -= parameter.nbytes
    return [Bucket(i, group, last=i + 1 == len(groups)) for i, group in enumerate(groups)]
