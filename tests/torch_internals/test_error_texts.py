"""Errors of torch are recognised by the words of the installed torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.errors import ChangedWeightError
from fxsplit.torch_internals.error_texts import (
    is_changed_tensor,
    is_out_of_memory,
    is_refusal_of_hooks,
    is_second_backward,
)
from tests.support.models import FAST

KINDS = (is_second_backward, is_changed_tensor, is_refusal_of_hooks, is_out_of_memory)


def fail_twice() -> None:
    out = nn.Linear(3, 3)(torch.ones(2, 3)).tanh().sum()
    out.backward()
    out.backward()


def fail_changed() -> None:
    layer = nn.Linear(3, 3)
    out = layer(torch.ones(2, 3, requires_grad=True))
    with torch.no_grad():
        layer.weight.mul_(2)
    out.sum().backward()


def fail_hooked() -> None:
    with torch.autograd.graph.save_on_cpu():
        torch.func.grad(lambda x: x.sin().sum())(torch.ones(2))


def fail_for_memory() -> None:
    torch.empty(2**50)


FAILURES = (fail_twice, fail_changed, fail_hooked, fail_for_memory)


@pytest.mark.parametrize(("kind", "fail"), list(zip(KINDS, FAILURES, strict=True)))
def test_an_error_is_of_one_kind(kind: Callable[[BaseException], bool], fail: Callable[[], None]) -> None:
    with pytest.raises(RuntimeError) as caught:
        fail()
    assert [each for each in KINDS if each(caught.value)] == [kind]
    assert not any(each(RuntimeError("something else")) or each(ValueError(str(caught.value))) for each in KINDS)


def test_a_changed_weight_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with fxsplit.compile(model, 2, example_inputs=torch.randn(8, 8), passes=FAST) as pipe:
        out = pipe(torch.randn(8, 8))
        with torch.no_grad():
            model[2].weight.mul_(2)  # type: ignore[operator]
        with pytest.raises(ChangedWeightError, match="weight' has changed since the pipeline's forward"):
            out.sum().backward()
