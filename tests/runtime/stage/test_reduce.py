"""Sums of replicas are added on the first one's device, piece by piece."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit.runtime.stage.reduce import add_replica
from fxsplit.runtime.stage.streams import DeviceStream
from fxsplit.torch_internals.autograd.sums import LEAST_BYTES, Sums

CPU = torch.device("cpu")
LARGE = LEAST_BYTES // 4
"""The number of floats in a large gradient."""


class Copying(DeviceStream):
    """Copies what it receives, like a device, and records each time how many gradients are left on the other device."""

    def __init__(self, watched: Sequence[Tensor]) -> None:
        super().__init__(CPU)
        self._there = [weakref.ref(one) for one in watched]
        self._here: list[weakref.ref[Tensor]] = []
        self.left: list[int] = []
        self.held: list[int] = []

    def receive(self, values: Sequence[Any], token: Any = None) -> list[Any]:
        self.left.append(sum(one() is not None for one in self._there))
        self.held.append(sum(one() is not None for one in self._here))
        found = [value.clone() for value in values]
        self._here += map(weakref.ref, found)
        return found


def test_large_gradients_come_one_by_one() -> None:
    """Each is gone, at both ends, before the next one comes."""
    leaves, others = ([torch.zeros(LARGE, requires_grad=True) for _ in range(5)] for _ in range(2))
    sums = Sums({leaf: torch.ones(LARGE) for leaf in leaves})
    part = Sums({leaf: torch.full((LARGE,), 2.0) for leaf in others})
    stream = Copying(list(part.totals.values()))
    add_replica(sums, part, dict(zip(others, leaves, strict=True)), stream)
    assert stream.left == [5, 4, 3, 2, 1] and stream.held == [0] * 5
    assert not part.totals and list(sums.totals) == leaves
    assert all(torch.equal(total, torch.full((LARGE,), 3.0)) for total in sums.totals.values())


def test_small_gradients_come_together() -> None:
    leaves = [torch.zeros(LARGE // 4, requires_grad=True) for _ in range(10)]
    sums, part = Sums(), Sums({leaf: torch.ones(LARGE // 4) for leaf in leaves})
    stream = Copying(list(part.totals.values()))
    add_replica(sums, part, {}, stream)
    assert stream.left == [10, 6, 2]
    assert list(sums.totals) == leaves and all(float(total.sum()) == LARGE // 4 for total in sums.totals.values())


def test_sparse_gradients_and_those_of_one_replica_alone() -> None:
    one, two, loss = (torch.zeros(3, requires_grad=True) for _ in range(3))
    dense = torch.tensor([1.0, 0.0, 2.0])
    sums, part = Sums({one: dense.clone()}), Sums({two: dense.to_sparse(), loss: dense.clone()})
    add_replica(sums, part, {two: one}, Copying([]))
    assert torch.equal(sums.totals[one], 2 * dense) and torch.equal(sums.totals[loss], dense)
