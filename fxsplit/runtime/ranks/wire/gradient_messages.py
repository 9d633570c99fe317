"""Send sums of gradients as messages. Each gradient comes with the number of its leaf, which both ends count alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.schedule.action import Action
from fxsplit.torch_internals.autograd.sums import Sums


class SumsCodec:
    """Turns sums of gradients into the values of a message, and back.

    list_leaves: returns the leaves of a replica, for the action that sums the gradients of replicas.
    """

    def __init__(self) -> None:
        self.list_leaves: Callable[[Action], Sequence[Tensor]] = lambda action: ()

    def pack(self, sums: Sums, action: Action) -> list[Any]:
        """Return the values of a message for sums of gradients, and empty the sums."""
        values: list[Any] = []
        for number, leaf in enumerate(self.list_leaves(action)):
            total = sums.totals.pop(leaf, None)
            if total is not None:
                values += pack_gradient(number, total)
        if sums.totals:
            raise InputError(
                "the loss trains a parameter of its own, and its stage has replicas on several ranks: make it a "
                "parameter of the model"
            )
        return values

    def unpack(self, values: Sequence[Any], action: Action) -> Sums:
        """Return the sums of gradients that a message holds."""
        leaves = self.list_leaves(action)
        return Sums({leaves[number]: gradient for number, gradient in unpack_gradients(values)})


def pack_gradient(number: int, gradient: Tensor) -> list[Any]:
    """Return the values of a message for one numbered gradient. A sparse gradient is sent as its indices and values."""
    if gradient.layout is torch.strided:
        return [number, None, gradient]
    sparse = gradient.coalesce()
    return [number, tuple(sparse.shape), sparse.indices(), sparse.values()]


def make_sparse(indices: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a sparse gradient from the indices and values of another, which were valid and are not checked again."""
    return torch.sparse_coo_tensor(indices, values, tuple(shape), is_coalesced=True, check_invariants=False)


def unpack_gradients(values: Sequence[Any]) -> list[tuple[int, Tensor]]:
    """Return the numbered gradients of a message."""
    ahead, found = iter(values), []
    for number in ahead:
        shape, first = next(ahead), next(ahead)
        gradient = first if shape is None else make_sparse(first, next(ahead), shape)
        found.append((number, gradient))
    return found
