"""Compression: values are restored within rounding, other values are sent as they are, and NaN and infinity survive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fxsplit.runtime.job.compress import compress, dequantize, quantize, restore
from tests.support.graphs import try_examples


def pass_over(value: Any, how: str) -> Any:
    (found,), _ = restore(*compress([value], [True], how))
    return found


@try_examples(60)
@given(st.integers(0, 10**6), st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]))
def test_int8_is_off_by_half_a_step_of_its_row(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    value = (torch.randn(3, 4, 64, generator=generator) * torch.rand(3, 4, 1, generator=generator) * 100).to(dtype)
    found = pass_over(value, "int8")
    assert found.dtype == dtype and found.shape == value.shape
    largest = value.abs().amax(-1, keepdim=True).double()
    # Half a step, plus the rounding of scale and product in the elements' dtype.
    slack = 4 * torch.finfo(dtype).eps * largest
    assert bool(((found.double() - value.double()).abs() <= largest / 254 + slack).all())


def test_bf16_rounds_to_the_nearest() -> None:
    value = torch.randn(5, 7, dtype=torch.float64)
    assert torch.equal(pass_over(value, "bf16"), value.to(torch.bfloat16).double())


@pytest.mark.parametrize("how", ["bf16", "int8"])
def test_all_else_is_sent_as_it_is(how: str) -> None:
    values = [None, 3, "text", torch.arange(4), torch.ones(2) > 0, torch.empty(0, 3), torch.eye(3).to_sparse()]
    sent, about = compress(values, [False] * 7, how)
    assert all(a is b for a, b in zip(sent[:7], values, strict=True)) and sent[7:] == [None] * 7 and len(about) == 14
    found, kept = restore(sent, about)
    assert all(a is b for a, b in zip(found, values, strict=True)) and kept == [False] * 7


def test_a_lost_gradient_has_its_place() -> None:
    value = torch.randn(2, 64)
    sent, _ = compress([None, value], [], "int8")
    assert sent[0] is None and sent[2] is None and sent[1].dtype is torch.int8 and sent[3].shape == (2,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_infinite_elements_are_not_hidden(bad: float) -> None:
    value = torch.ones(2, 64)
    value[1, 3] = bad
    found = pass_over(value, "int8")
    assert bool(torch.isfinite(found[0]).all()) and not bool(torch.isfinite(found[1]).any())


def test_zeros_and_the_ends_of_the_range() -> None:
    value = torch.tensor([[0.0] * 64, [-2.0] + [2.0] * 63])
    whole, scales = quantize(value)
    assert scales.tolist() == [0.0, pytest.approx(2 / 127)] and whole[1, :2].tolist() == [-127, 127]
    assert torch.allclose(dequantize(whole, scales), value, rtol=1e-6)


def test_strides_do_not_matter() -> None:
    value: Tensor = torch.randn(2, 3, 8, 16).to(memory_format=torch.channels_last)
    assert torch.equal(pass_over(value, "int8"), pass_over(value.contiguous(), "int8"))
