"""Numbers that the host learns of once an accelerator has come to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxsplit.torch_internals.tensors import accelerators, host_copies
from fxsplit.torch_internals.tensors.accelerators import is_on_host
from fxsplit.torch_internals.tensors.host_copies import HostCopy, PendingCopies


def test_what_is_on_the_host_is_there() -> None:
    assert is_on_host(torch.ones(1))
    copy = HostCopy(torch.tensor([1.0, 2.0]))
    assert copy.is_there and copy.read().tolist() == [1.0, 2.0]


def test_what_an_accelerator_computes_is_there_when_it_has_come_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    event: Any = SimpleNamespace(query=lambda: bool(waited), synchronize=lambda: waited.append(1))
    monkeypatch.setattr(accelerators, "is_on_host", lambda tensor: False)
    monkeypatch.setattr(accelerators, "find_current_stream", lambda device: SimpleNamespace(record_event=lambda: event))
    copy = HostCopy(torch.tensor(True))
    assert not copy.is_there and not waited
    assert bool(copy.read()) and waited and copy.is_there


def test_coming_answers_are_taken_in_order_and_up_to_the_first_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {0.0, 2.0}

    class Slow(HostCopy):
        @property
        def is_there(self) -> bool:
            return float(self.read()) in there

    monkeypatch.setattr(host_copies, "HostCopy", Slow)
    coming: PendingCopies[str] = PendingCopies(3)
    for number, about in enumerate("abc"):
        assert not coming.is_full
        coming.add(torch.tensor(float(number)), about)
    assert coming.is_full
    assert [(float(value), about) for value, about in coming.take_arrived()] == [(0.0, "a")]
    there.add(1.0)
    assert [about for _, about in coming.take_arrived()] == ["b", "c"]
