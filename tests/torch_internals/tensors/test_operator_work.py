"""FLOPs and bytes of operators equal those counted by hand from their shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import flop_registry, register_flop_formula

from fxsplit.torch_internals.tensors.operator_work import Kernel, OperatorWatch


def find(run: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Return the class, FLOPs and bytes of each kernel that `run` launches on the meta device."""
    found: list[Kernel] = []
    with OperatorWatch(found.append).enter():
        run()
    return [(kernel.kind, kernel.flops, kernel.bytes) for kernel in found]


def meta(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


X, W, B = meta(6, 10), meta(20, 10), meta(20)
IDS = meta(7, dtype=torch.long)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda: F.linear(X, W), ("matmul", 2 * 6 * 10 * 20, 4 * (60 + 200 + 120))),
        (lambda: F.linear(X, W, B), ("matmul", 2 * 6 * 10 * 20, 4 * (60 + 200 + 20 + 120))),
        (lambda: torch.bmm(meta(3, 4, 5), meta(3, 5, 6)), ("matmul", 2 * 3 * 4 * 5 * 6, 4 * (60 + 90 + 72))),
        (
            lambda: torch.baddbmm(meta(3, 4, 6), meta(3, 4, 5), meta(3, 5, 6), beta=0),
            ("matmul", 2 * 3 * 4 * 5 * 6, 4 * (60 + 90 + 72)),
        ),
        (lambda: X + X, ("pointwise", 0, 4 * (60 + 60))),
        (lambda: X + meta(1, 10).expand(6, 10), ("pointwise", 0, 4 * (60 + 10 + 60))),
        (lambda: X.to(torch.float16), ("other", 0, 4 * 60 + 2 * 60)),
        (lambda: torch.relu_(meta(6, 10)), ("pointwise", 0, 4 * (60 + 60))),
        (lambda: torch.zeros(5, 4, device="meta"), ("other", 0, 4 * 20)),
        (lambda: F.embedding(IDS, W), ("gather", 0, 2 * 4 * 7 * 10)),
        (lambda: torch.softmax(X, -1), ("softmax", 0, 4 * (60 + 60))),
        # Statistics of a batch come first, and then the input is read again.
        (lambda: F.batch_norm(X, None, None, training=True), ("normalization", 0, 4 * (60 + 60 + 60 + 10 + 10))),
        (
            lambda: torch.zeros(9, 10, device="meta").index_put_((IDS,), meta(7, 10)),
            ("gather", 0, 2 * (4 * 70 + 8 * 7)),
        ),
        (lambda: F.layer_norm(X, (10,)), ("normalization", 0, 4 * (60 + 60 + 6 + 6))),
        (
            lambda: F.conv2d(meta(2, 3, 8, 8), meta(5, 3, 3, 3)),
            ("convolution", 2 * 2 * 5 * 6 * 6 * 3 * 9, 4 * (2 * 3 * 64 + 5 * 27 + 2 * 5 * 36)),
        ),
        (lambda: torch.linalg.inv(meta(4, 4)), ("unknown", 0, None)),
        (lambda: torch.sort(X), ("unknown", 0, 4 * 60 + 4 * 60 + 8 * 60)),
    ],
)
def test_work_is_counted_from_shapes(run: Callable[[], object], expected: tuple[str, float, float | None]) -> None:
    kind, flops, moved = find(run)[-1]
    assert (kind, flops) == expected[:2] and expected[2] in (None, moved)


def test_dropout_is_one_kernel_each_way() -> None:
    x, out = meta(6, 10, grad=True), list[Tensor]()
    assert [k for k, _, _ in find(lambda: out.append(F.dropout(x)))] == ["pointwise"]
    assert len(find(lambda: torch.autograd.grad(out[0], x, torch.empty_like(x)))) == 1
    assert find(lambda: F.dropout(x, training=False)) == []


def test_a_mixture_of_experts_computes_each_row_once() -> None:
    """Half of the rows go to each of two experts, and no row meets both."""
    offsets = torch.empty(2, dtype=torch.int32, device="meta")
    rows, experts = meta(32, 16, dtype=torch.bfloat16), meta(2, 16, 64, dtype=torch.bfloat16)
    (found,) = [k for k in find(lambda: torch._grouped_mm(rows, experts, offs=offsets)) if k[0] == "matmul"]
    assert found[1] == 2 * 32 * 16 * 64


@pytest.mark.parametrize("use", [lambda x: x.view(-1), lambda x: x.t(), lambda x: x[1:], lambda x: x.detach()])
def test_views_launch_nothing(use: Callable[[Tensor], Tensor]) -> None:
    assert find(lambda: use(X)) == []


def attend(shape: tuple[int, ...], keys: tuple[int, ...], **options: Any) -> list[tuple[str, float, float]]:
    q, k = (meta(*s, dtype=torch.bfloat16, grad=True) for s in (shape, keys))

    def run() -> None:
        out = F.scaled_dot_product_attention(q, k, k, **options)
        assert out.shape == q.shape
        torch.autograd.grad(out, (q, k), torch.empty_like(out))

    return find(run)


def test_attention_is_one_fused_kernel_each_way() -> None:
    """No kernel writes the 128 x 128 scores: two products forward, and five backward."""
    found = attend((2, 4, 128, 64), (2, 4, 128, 64))
    product = 2 * 2 * 4 * 128 * 128 * 64
    attention = [flops for kind, flops, _ in found if kind == "attention"]
    assert attention == [2 * product, 5 * product]
    assert max(moved for _, _, moved in found) < 2 * 2 * 4 * 128 * 128 * 2 * 2


def test_causal_attention_skips_half_and_masks_are_read() -> None:
    product = 2 * 2 * 4 * 128 * 128 * 64
    causal = attend((2, 4, 128, 64), (2, 4, 128, 64), is_causal=True)
    assert [flops for kind, flops, _ in causal if kind == "attention"] == [product, 2.5 * product]
    for dtype in (torch.bool, torch.bfloat16):
        masked = attend((2, 4, 128, 64), (2, 4, 128, 64), attn_mask=meta(128, 128, dtype=dtype))
        assert [flops for kind, flops, _ in masked if kind == "attention"] == [2 * product, 5 * product]


def test_grouped_queries_and_three_dimensions_are_attention_too() -> None:
    def count(*shapes: tuple[int, ...], **options: Any) -> float:
        return next(flops for kind, flops, _ in attend(*shapes, **options) if kind == "attention")

    assert count((2, 8, 128, 64), (2, 2, 128, 64), enable_gqa=True) == 2 * 2 * 2 * 8 * 128 * 128 * 64
    assert count((4, 128, 64), (4, 128, 64)) == 4 * 4 * 128 * 128 * 64


def test_an_operator_of_elsewhere_is_unknown_until_it_has_a_formula() -> None:
    @torch.library.custom_op("fxsplit_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    twice.register_fake(lambda x: torch.empty_like(x))
    assert find(lambda: twice(X)) == [("unknown", 0, 4 * (60 + 60))]
    packet = torch.ops.fxsplit_test.twice
    register_flop_formula(packet)(lambda shape, *, out_shape=None, **_: 7 * shape[0])
    try:
        assert find(lambda: twice(X)) == [("matmul", 7 * 6, 4 * (60 + 60))]
    finally:
        del flop_registry[packet]
