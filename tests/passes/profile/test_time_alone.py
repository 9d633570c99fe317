"""Timing operators one by one, on values that are made up."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxsplit.errors import ProfileError
from fxsplit.passes.profile.clock import Clock
from fxsplit.passes.profile.time_alone import TimedCall, make_up_tensor, time_alone
from fxsplit.passes.profile.time_in_step import HALVED, WARM_UP

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "like",
    [
        torch.empty(3, 4, device="meta"),
        torch.empty(4, 3, device="meta", dtype=torch.bfloat16).t(),
        torch.empty(3, 1, device="meta").expand(3, 5),
        torch.empty(0, 4, device="meta"),
        torch.empty((), device="meta", dtype=torch.complex64),
        torch.empty(2, device="meta", requires_grad=True),
        nn.Parameter(torch.empty(2, device="meta"), requires_grad=False),
    ],
)
def test_made_up_tensors_are_like_the_original(like: Tensor) -> None:
    made = make_up_tensor(like, CPU)
    assert type(made) is type(like) and made.device == CPU and made.requires_grad == like.requires_grad
    assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
    assert bool(torch.isfinite(made).all()) and (made.numel() < 2 or float(made.detach().abs().sum()) > 0)


def test_made_up_integers_are_indices_and_booleans_are_true() -> None:
    assert make_up_tensor(torch.empty(3, dtype=torch.int64, device="meta"), CPU).tolist() == [0, 0, 0]
    assert make_up_tensor(torch.empty(2, dtype=torch.bool, device="meta"), CPU).tolist() == [True, True]


def test_what_a_clock_says_is_what_is_told() -> None:
    """A clock that counts its calls: every turn asks four times, forward from the first to the second."""
    ticks = iter(range(10_000))
    layer = nn.Linear(4, 4)
    x = torch.empty(2, 4, device="meta", requires_grad=True)
    told: list[int] = []
    with patch.object(Clock, "now", lambda self: float(next(ticks) ** 2)):
        times = time_alone({"a": TimedCall(layer, (x,), {})}, CPU, 1, lambda: told.append(1))
    # The second turn is the one that counts: the clock says 16, 25, 36, 49.
    forward, backward, weight, spread, *_ = times["a"]
    assert (WARM_UP, HALVED, told) == (1, 2, [1]) and (forward, backward) == (25 - 16, 49 - 36)
    assert spread is None, "one repeat says nothing of noise"
    assert 0 < weight < backward


def test_calls_that_write_get_copies_and_methods_are_called_on_the_first_argument() -> None:
    x = torch.empty(2, 4, device="meta", requires_grad=True)
    times = time_alone({"a": TimedCall("add_", (x, 1.0), {}, writes=True)}, CPU, 1, lambda: None)
    assert times["a"][0] > 0 and times["a"][2] == 0
    with pytest.raises(ProfileError, match=r"node 'a' cannot be timed on made-up values.*leaf"):
        time_alone({"a": TimedCall("add_", (x, 1.0), {})}, CPU, 1, lambda: None)


def test_one_tensor_that_is_given_twice_stays_one() -> None:
    seen = []

    def same(a: Tensor, b: Tensor) -> Tensor:
        seen.append(a is b)
        return a * b

    x = torch.empty(2, device="meta")
    time_alone({"a": TimedCall(same, (x,), {"b": x})}, CPU, 1, lambda: None)
    assert all(seen) and seen


def test_the_models_own_weights_stay_on_the_meta_device() -> None:
    with torch.device("meta"):
        layer = nn.BatchNorm1d(4)
    time_alone({"a": TimedCall(layer, (torch.empty(3, 4, device="meta"),), {})}, CPU, 1, lambda: None)
    assert all(w.is_meta for w in (*layer.parameters(), *layer.buffers()))


def test_an_operator_without_a_derivative_is_timed_forward() -> None:
    """torch's error ended the profile, though no backward of a detached value ever runs."""
    x = torch.empty(2, 4, device="meta", requires_grad=True)
    forward_ms, backward_ms, *_ = time_alone(
        {"a": TimedCall("bernoulli", (x,), {"p": 0.5}), "b": TimedCall(torch.floor_divide, (x, 2), {})},
        CPU,
        1,
        lambda: None,
    )["b"]
    assert forward_ms > 0 and backward_ms >= 0


@pytest.mark.parametrize("given", ["by position", "by name"])
def test_all_experts_of_a_mixture_get_rows(given: str) -> None:
    """Offsets of zeros would leave nothing to measure: torch skips experts without rows."""
    rows, weights, ends = torch.randn(10, 16), torch.randn(4, 16, 32), torch.zeros(4, dtype=torch.int32)
    seen: list[list[int]] = []

    class Operator:
        _schema = torch.ops.aten._grouped_mm.default._schema

        def __call__(self, rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
            seen.append(offs.tolist())
            return F.grouped_mm(rows, weights, offs=offs)

    call = TimedCall(Operator(), (rows, weights, ends), {})
    if given == "by name":
        call = TimedCall(lambda a, b, offs: Operator()(a, b, offs), (rows, weights), {"offs": ends})
    time_alone({"a": call}, CPU, 1, lambda: None)
    assert set(map(tuple, seen)) == {(2, 5, 7, 10)}
