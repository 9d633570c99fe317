"""Estimated times are FLOPs and bytes divided by the figures of the device, forward and backward apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit.errors import InputError, ProfileError
from fxsplit.formats.device_kinds import DeviceKind, find_device_kind
from fxsplit.ir.facts.costs.known import Measured
from fxsplit.passes.profile.estimate import FUSED, Estimator
from fxsplit.passes.profile.time_alone import TimedCall

KIND = replace(
    find_device_kind("a100-40"),
    peak={"float32": 1e12, "tf32": 2e12, "float16": 4e12},
    bandwidth=1e9,
    efficiency={"tensor_matmul": 0.5, "matmul": 1.0, "convolution": 1.0, "attention": 1.0, "memory": 0.5},
    launch_us=0.0,
    host_us=7.0,
)
"""A device of round figures: 0.5e9 bytes per second, and 1e12 FLOP/s in float32, tf32 and float16 alike, at best."""
FAST = replace(KIND, bandwidth=1e15)
"""The same without the time of moving bytes."""


def estimate(target: Any, *shapes: tuple[int, ...], kind: DeviceKind = KIND, **options: Any) -> Measured:
    """Return the estimate of a call with inputs that require gradients."""
    dtype = options.pop("dtype", torch.float32)
    inputs = tuple(torch.empty(shape, device="meta", dtype=dtype, requires_grad=True) for shape in shapes)
    estimator = Estimator(kind, (), **{"tf32": False, "compiled": False, **options})
    return estimator.estimate({"node": TimedCall(target, inputs, {})})["node"]


def meta(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    return module.to("meta").to(dtype)


def test_a_layer_computes_its_input_gradient_and_its_weight_gradient_as_long_as_its_forward() -> None:
    found = estimate(meta(nn.Linear(1000, 2000, bias=False)), (500, 1000), kind=FAST)
    product_ms = 2 * 500 * 1000 * 2000 / 1e12 * 1e3
    assert found.forward_ms == pytest.approx(product_ms, rel=1e-3)
    assert found.backward_ms == pytest.approx(2 * product_ms, rel=1e-3)
    assert found.weight_ms == pytest.approx(product_ms, rel=1e-3)
    assert found.kind == "matmul" and found.spread_ms == pytest.approx(0.3 * 3 * product_ms, rel=1e-2)
    # One operator forward, and at least two backward.
    assert found.forward_launch_ms == pytest.approx(0.007) and found.backward_launch_ms >= 0.014


def test_a_pointwise_operator_takes_the_time_of_its_bytes() -> None:
    found = estimate(torch.exp, (1000, 1000))
    # It reads and writes 4 MB; its backward reads two tensors, and writes one.
    assert found.forward_ms == pytest.approx(8e6 / 0.5e9 * 1e3)
    assert found.backward_ms == pytest.approx(12e6 / 0.5e9 * 1e3) and found.weight_ms == 0.0
    assert found.kind == "pointwise"


def test_the_slower_of_computing_and_moving_counts() -> None:
    layer = meta(nn.Linear(100, 100, bias=False))
    moved = 4 * (100 * 100 + 2 * 100 * 100)
    assert estimate(layer, (100, 100)).forward_ms == pytest.approx(moved / 0.5e9 * 1e3)


@pytest.mark.parametrize(
    ("dtype", "tf32", "flops_per_s"),
    [(torch.float32, False, 1e12), (torch.float32, True, 1e12), (torch.float16, False, 2e12)],
)
def test_the_dtype_chooses_the_peak_and_tensor_cores_their_share(
    dtype: torch.dtype, tf32: bool, flops_per_s: float
) -> None:
    """tf32 has twice the peak of float32, and tensor cores reach half of theirs."""
    layer = meta(nn.Linear(1000, 1000, bias=False), dtype)
    found = estimate(layer, (1000, 1000), kind=FAST, dtype=dtype, tf32=tf32)
    assert found.forward_ms == pytest.approx(2e9 / flops_per_s * 1e3, rel=1e-3)


def test_every_kernel_takes_a_launch() -> None:
    slow = replace(FAST, launch_us=50.0)
    assert estimate(torch.exp, (10,), kind=slow).forward_ms == pytest.approx(0.05, rel=1e-3)
    assert estimate(torch.t, (10, 10), kind=slow).forward_ms == 0.0


def test_compiled_operators_move_a_share_of_their_bytes_and_products_all() -> None:
    plain, compiled = estimate(torch.exp, (1000, 1000)), estimate(torch.exp, (1000, 1000), compiled=True)
    assert compiled.forward_ms == pytest.approx(FUSED * plain.forward_ms, rel=1e-5)
    layer = meta(nn.Linear(100, 100, bias=False))
    assert estimate(layer, (100, 100), compiled=True).forward_ms == estimate(layer, (100, 100)).forward_ms


def test_allocations_are_counted_without_memory() -> None:
    found = estimate(lambda x: (x * 2).exp(), (1000, 1000))
    # The product lives until exp has its result, which its backward keeps.
    assert found.forward_peak_bytes == 8e6
    assert found.backward_peak_bytes == 8e6


def test_an_unknown_operator_is_named_once_and_marked() -> None:
    estimator = Estimator(KIND, (), tf32=False, compiled=False)
    call = TimedCall(torch.linalg.inv, (torch.empty(8, 8, device="meta", requires_grad=True),), {})
    found = estimator.estimate({"first": call, "second": call})
    assert found["first"].kind == found["second"].kind == "unknown" and found["first"].forward_ms > 0
    assert estimator.describe().unknown == ("aten::linalg_inv_ex",)


def test_a_device_without_the_dtype_of_most_weights_is_refused() -> None:
    weights = [torch.empty(100, dtype=torch.bfloat16), torch.empty(10)]
    with pytest.raises(InputError, match="device 'v100' does not compute in bfloat16"):
        Estimator(find_device_kind("v100"), weights, tf32=False, compiled=False)
    assert Estimator(find_device_kind("v100"), weights[1:], tf32=True, compiled=False).describe().dtype == "float32"
    assert Estimator(find_device_kind("h100"), weights[1:], tf32=True, compiled=False).describe().dtype == "tf32"


def test_a_call_that_needs_values_is_refused_with_the_way_out() -> None:
    def reads(x: Tensor) -> Tensor:
        return x * float(x.sum())

    with pytest.raises(ProfileError, match=r"reads does not run on the meta device.*shapes=True, --shapes"):
        estimate(reads, (4,))


def test_without_gradients_there_is_no_backward() -> None:
    call = TimedCall(meta(nn.Linear(10, 10)), (torch.empty(4, 10, device="meta"),), {})
    found = Estimator(KIND, (), tf32=False, compiled=False).estimate({"node": call}, trains=False)["node"]
    assert found.forward_ms > 0 and found.backward_ms == found.backward_launch_ms == 0
