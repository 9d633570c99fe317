"""Shapes of operators with a fake kernel stricter than the real one come from the real kernel."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

import fxsplit
from fxsplit.torch_internals.fake.real_shapes import RealShapes
from fxsplit.torch_internals.fake.runnable import make_runnable
from tests.support.mixtures import N_EXPERTS, Mixture
from tests.support.models import FAST

ENDS = torch.tensor([2, 3, 6, 8], dtype=torch.int32)


class Grouped(nn.Module):
    """A module with only the operator."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(N_EXPERTS, 16, 32).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.grouped_mm(x, self.experts, offs=ENDS.to(x.device))


class Exported(Mixture):
    """The same, with Python flow that only torch.export follows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone() if x.shape[1] > 3 else x)


@pytest.mark.parametrize(("kind", "compiled"), [(Mixture, True), (Mixture, False), (Exported, True)])
def test_a_mixture_of_experts_without_weights_is_the_model(
    kind: type[Mixture], compiled: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two training steps equal the unsplit model's, and torch logs nothing about the fake kernel."""
    torch.manual_seed(0)
    wanted = kind()
    x, target = torch.randn(16, 8), torch.randn(16, 8)
    save_file(wanted.state_dict(), tmp_path / "model.safetensors")
    with fxsplit.without_weights():
        model = kind()
    options: Any = {"passes": FAST, "n_microbatches": 2, "loss_fn": F.mse_loss, "weights": tmp_path}
    if compiled:
        options["example_inputs"] = x
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, wanted))
    with caplog.at_level(logging.DEBUG, "torch"), fxsplit.compile(model, 2, **options) as pipe:
        for _ in range(2):
            loss = pipe.step(x, target=target)
            parts = zip(x.chunk(2), target.chunk(2), strict=True)
            expected = torch.stack([F.mse_loss(wanted(a), b) for a, b in parts]).mean()
            expected.backward()
            torch.testing.assert_close(loss, expected.detach())
            for p, q in zip(model.parameters(), wanted.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
            optimizer.step(), theirs.step()
            optimizer.zero_grad(), theirs.zero_grad()
        assert pipe.front_end == ("export" if kind is Exported else "symbolic_trace")
        torch.testing.assert_close(pipe(x[:6]), wanted(x[:6]))
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_mixture_of_experts_with_weights_is_exported() -> None:
    torch.manual_seed(0)
    model, x = Exported(), torch.randn(16, 8)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=FAST) as pipe:
        assert pipe.front_end == "export"
        torch.testing.assert_close(pipe(x), model(x))
        torch.testing.assert_close(pipe(x[:5]), model(x[:5]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fake_results_are_those_of_the_real_kernel(dtype: torch.dtype) -> None:
    """Shape, strides, dtype and gradients, run after run."""
    model, x = Grouped(dtype), torch.randn(8, 16).to(dtype)
    wanted = copy.deepcopy(model)(x)
    with make_runnable(model, [x], from_shapes=True) as (here, (given,)):
        for _ in range(2):
            made = here(given)
            assert (made.shape, made.stride(), made.dtype) == (wanted.shape, wanted.stride(), dtype)
            (grad,) = torch.autograd.grad(made, list(here.parameters()), torch.ones_like(made))
            assert grad.shape == model.experts.shape


def test_what_no_kernel_takes_stays_refused() -> None:
    with (
        make_runnable(Grouped(torch.float64), [torch.randn(8, 16).double()], from_shapes=True) as (model, (x,)),
        pytest.raises(RuntimeError, match=r"Expected .*(BF16|BFloat16)"),
    ):
        model(x)


def test_what_made_up_values_cannot_answer_stays_refused() -> None:
    """A value-dependent result, an operator that writes, symbolic sizes, and tensors on two devices."""
    shapes, aten, x = RealShapes(), torch.ops.aten, torch.zeros(2, 3)
    symbols = ShapeEnv()
    with FakeTensorMode(shape_env=symbols) as mode:
        fake = mode.from_tensor(x, static_shapes=True)
        symbolic = torch.empty(symbols.create_unbacked_symint(), 3)
        elsewhere = torch.empty(2, 3, device="meta")
    plain = RuntimeError("refused")
    for func, given, refused in (
        (aten.nonzero.default, fake, DynamicOutputShapeException(aten.nonzero.default)),
        (aten.relu_.default, fake, plain),
        (aten.t.default, fake, plain),
        (aten.relu.default, symbolic, plain),
        (aten.add.Tensor, (fake, elsewhere), plain),
    ):
        with pytest.raises(type(refused)) as caught:
            shapes.find(mode, func, given if isinstance(given, tuple) else (given,), {}, refused)
        assert caught.value is refused
    assert shapes.find(mode, aten.relu.default, (fake,), {}, plain).shape == (2, 3)


class ReadsInBackward(torch.autograd.Function):
    """Each row times a number; the backward reads the numbers one by one, as transformers' experts do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ends,) = ctx.saved_tensors
        made, start = torch.zeros_like(grad), 0
        for end in ends.tolist():
            if start == end:
                continue
            made[start:end] = grad[start:end] * 2
            start = end
        return made, None


def test_a_backward_may_read_values() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor, ends: Tensor) -> Any:
            return ReadsInBackward.apply(self.first(x), ends)  # type: ignore[no-untyped-call]

    with make_runnable(Model(), [torch.randn(8, 4), ENDS], from_shapes=True) as (model, (x, ends)):
        model(x, ends).sum().backward()
        assert [p.grad.shape for p in model.parameters() if p.grad is not None] == [(4, 4), (4,)]
        model.zero_grad()
        with pytest.raises(Exception, match="data-dependent"):
            assert ends[0].item() > 1
