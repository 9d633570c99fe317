"""Weights with made-up values, which take memory only while an operator reads them."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import InputError
from fxsplit.torch_internals.fake import made_up
from fxsplit.torch_internals.fake.made_up import MadeUp, make_up, make_values
from fxsplit.torch_internals.fake.runnable import make_up_weights
from fxsplit.torch_internals.fake.values import has_values


def make_empty(build: Any) -> nn.Module:
    with fxsplit.without_weights():
        model: nn.Module = build()
    return model


def test_a_model_runs_on_them_and_has_its_own_afterwards() -> None:
    model = make_empty(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    before, x = list(model.parameters()), torch.randn(6, 4)
    with make_up_weights(model, [x]) as (here, (given,)), torch.no_grad():
        found, again = here(given), here(given)
        assert torch.equal(found, again) and found.isfinite().all() and found.std() > 0.1
        assert all(isinstance(p, nn.Parameter) and not has_values(p) for p in here.parameters())
        double = copy.deepcopy(here).double()
        assert all(isinstance(p, MadeUp) for p in double.parameters())
        torch.testing.assert_close(double(given.double()), found.double(), rtol=1e-4, atol=1e-5)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert not model[1].running_mean.any(), "a buffer is a copy"  # type: ignore[index]


def test_one_weight_at_a_time_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    held: list[int] = []

    def note(weight: MadeUp) -> Tensor:
        value = make_values(weight)
        made.append(weakref.ref(value))
        held.append(sum(one() is not None for one in made))
        return value

    monkeypatch.setattr(made_up, "make_values", note)
    model = make_empty(lambda: nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(8))))
    with make_up_weights(model, [torch.randn(2, 8)]) as (here, (x,)), torch.no_grad():
        here(x)
    assert len(held) == 8 and max(held) == 1


@pytest.mark.parametrize(
    "weight",
    [
        torch.empty(5, 3, device="meta"),
        torch.empty(3, 5, device="meta").t(),
        torch.empty(2, 4, 4, device="meta", dtype=torch.bfloat16),
        torch.empty(70_000, 2, device="meta"),
        torch.empty(0, 3, device="meta"),
        torch.empty((), device="meta"),
        torch.empty(4, 2, device="meta", dtype=torch.complex64),
    ],
)
def test_values_have_shape_strides_and_dtype(weight: Tensor) -> None:
    made = make_values(make_up(weight, 1))
    assert (made.shape, made.stride(), made.dtype) == (weight.shape, weight.stride(), weight.dtype)
    assert torch.equal(made, make_values(make_up(weight, 1)))
    assert not weight.numel() or not torch.equal(made, make_values(make_up(weight, 2)))


def test_integers_are_indices_and_flags_are_set() -> None:
    whole, flags = (torch.empty(3, device="meta", dtype=kind) for kind in (torch.int64, torch.bool))
    assert not make_values(make_up(whole, 0)).any() and make_values(make_up(flags, 0)).all()


def test_inputs_need_values() -> None:
    runnable = make_up_weights(nn.Linear(2, 2), [torch.empty(2, 2, device="meta")])
    with pytest.raises(InputError, match="give an example with values"), runnable:
        pass
