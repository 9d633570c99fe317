"""Copies of modules that keep results of autograd: copies are plain values, and the originals do not change."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.torch_internals.nn.copies import copy_module
from tests.support.models import FAST


@dataclass
class Kept:
    """Results of a call."""

    values: dict[str, Tensor] = field(default_factory=dict)


class Keeps(nn.Module):
    """Keeps its activations in a list, a dataclass and an attribute, and computes its weight from other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.utils.weight_norm(nn.Linear(8, 8))
        self.b = nn.Linear(8, 2)
        self.heads: list[Tensor | None] = [None]
        self.kept, self.last = Kept(), torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.heads[0] = self.kept.values["a"] = self.a(x).relu()
        out: Tensor = self.b(self.last)
        return out


def make() -> tuple[Keeps, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x = Keeps(), torch.randn(8, 8)
    return model, x, model(x)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_autograd_computed_is_copied_as_values() -> None:
    model, x, out = make()
    model.last.retain_grad()
    model.register_buffer("noted", model.last * 2)
    # A gradient that has a graph itself, of a tensor that is no parameter.
    free: Any = torch.ones(3, requires_grad=True)
    free.grad, free.note, model.free = (model.last.sum() * torch.ones(3)), model.last, free
    made = copy_module(model)
    for mine, own in ((made.last, model.last), (made.noted, model.noted), (made.free.grad, free.grad)):
        assert isinstance(mine, Tensor) and isinstance(own, Tensor)
        assert own.grad_fn is not None and mine.grad_fn is None and not mine.requires_grad
        assert torch.equal(mine, own) and mine.data_ptr() != own.data_ptr()
    # One tensor under several names stays one.
    copied: Any = made.free
    assert made.heads[0] is made.last is made.kept.values["a"] is copied.note
    assert made.free.requires_grad and torch.equal(made(x), out)
    out.sum().backward()
    assert model.last.grad is not None


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning", "ignore:forward.. of Keeps changes")
def test_a_model_that_keeps_activations_is_compiled_verified_and_copied() -> None:
    model, x, out = make()
    versions = model.last._version
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=FAST) as pipe:
        assert fxsplit.verify(pipe, x).equal
        assert model.last._version == versions
        with copy.deepcopy(pipe) as other:
            torch.testing.assert_close(other(x), out)
    # The user's own graph has not been written to.
    out.sum().backward()
