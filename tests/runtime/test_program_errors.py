"""An error is raised at once if the host can detect it, and in a later batch if only an accelerator can."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.runtime import program
from fxsplit.runtime.program import DeferredErrors
from fxsplit.torch_internals.tensors import host_copies
from fxsplit.torch_internals.tensors.host_copies import MOST_COMING, HostCopy


def test_what_the_host_can_read_is_raised_at_once() -> None:
    late = DeferredErrors()
    late.expect(torch.tensor(False), "no")
    with pytest.raises(InputError, match=r"^it is wrong$"):
        late.expect(torch.tensor(True), "it is wrong")
    late.raise_arrived()


def test_what_an_accelerator_knows_is_raised_later(monkeypatch: pytest.MonkeyPatch) -> None:
    there = False

    class Coming(HostCopy):
        def __init__(self, tensor: Tensor) -> None:
            super().__init__(tensor)
            made.append(self)

        @property
        def is_there(self) -> bool:
            return there

    made: list[HostCopy] = []
    monkeypatch.setattr(host_copies, "HostCopy", Coming)
    monkeypatch.setattr(program, "is_on_host", lambda tensor: False)
    late = DeferredErrors()
    late.expect(torch.tensor(False), "no")
    for _ in range(2 * MOST_COMING):
        late.expect(torch.tensor(True), "it is wrong")
    assert len(made) == MOST_COMING
    late.raise_arrived()
    there = True
    with pytest.raises(InputError, match=r"in an earlier batch, .* by now: it is wrong"):
        late.raise_arrived()
