"""A model whose kernels never repeat a run is compared with its graph up to the differences between its own runs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit.errors import TraceError
from fxsplit.frontend.check import noise
from fxsplit.frontend.check.noise import Noise
from fxsplit.frontend.check.values import check_graph
from tests.frontend.subjects import make_subject, trace

RUNS = itertools.count(1)
ULP = 2.0**-8


def shake(x: Tensor) -> Tensor:
    """Return values that are rounded otherwise in each run, as a kernel's whose threads arrive in any order."""
    signs = torch.tensor([(-1) ** (i * next(RUNS) % 7) for i in range(x.numel())], dtype=x.dtype).view_as(x)
    return x * (1 + ULP * signs)


@torch.library.custom_op("fxsplit_tests::attend", mutates_args=())
def attend(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("fxsplit_tests::attend_backward", mutates_args=())
def attend_backward(gradient: Tensor) -> Tensor:
    return shake(gradient)


@attend.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@attend_backward.register_fake
def _(gradient: Tensor) -> Tensor:
    return torch.empty_like(gradient)


attend.register_autograd(lambda ctx, gradient: attend_backward(gradient))


class Attends(nn.Module):
    """Its backward rounds otherwise in each run."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gain = nn.Linear(8, 8), nn.Linear(8, 4), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(attend(torch.tanh(self.a(x))) * self.gain)
        return out


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU for an accelerator, whose kernels need not repeat themselves."""
    monkeypatch.setattr(noise, "is_accelerator", lambda device: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.usefixtures("accelerator")
def test_a_graph_may_differ_as_much_as_the_model_from_itself(dtype: torch.dtype, apart: bool) -> None:
    """A transformer in bfloat16 did not compile on a GPU: the backward of attention differs from run to run."""
    torch.manual_seed(0)
    model, x = Attends().to(dtype), torch.randn(16, 8, dtype=dtype)
    check_graph(make_subject(model, x, apart=apart), trace(model), 16)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("lost", ["a.weight", "gain"])
def test_a_lost_gradient_is_seen_beside_noise(lost: str) -> None:
    torch.manual_seed(0)
    model, x = Attends(), torch.randn(16, 8)
    gm = trace(model)
    for node in gm.graph.nodes:
        if (node.name == "a" and lost == "a.weight") or node.name == lost:
            with gm.graph.inserting_after(node):
                detached = gm.graph.call_method("detach", (node,))
            node.replace_all_uses_with(detached, delete_user_cb=lambda user, own=detached: user is not own)
    gm.recompile()
    with pytest.raises(TraceError, match=f"another gradient for '{lost}'"):
        check_graph(make_subject(model, x), gm, 16)


def test_a_cpu_repeats_itself() -> None:
    """Without an accelerator a difference is a fault of the graph, and the model does not run again."""
    torch.manual_seed(0)
    model, x = Attends(), torch.randn(16, 8)
    with pytest.raises(TraceError, match="another gradient"):
        check_graph(make_subject(model, x), trace(model), 16)


def values(**named: Any) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in named.items()}


@pytest.mark.usefixtures("accelerator")
def test_what_noise_covers() -> None:
    a, b = torch.tensor([1.0, -2.0]), torch.tensor([1.0, -2.1])
    runs = iter([values(a=[1.0, -2.02], c=[0.0]), values(a=[1.0, -2.0], c=[0.0])])
    seen = Noise(lambda: next(runs))
    assert seen.covers("a", a, a) and seen.covers("a", a, a + 1e-6)  # nothing ran again
    assert seen.covers("a", a, b)  # eight times 0.02 are more than 0.1
    assert not seen.covers("a", a, torch.tensor([1.0, -2.3]))  # a tenth of the largest at most, and half of the digits
    assert seen.covers("c", torch.tensor([0.0]), torch.tensor([1e-6]), 1.0)
    assert not seen.covers("c", torch.tensor([0.0]), torch.tensor([1e-3]), 1.0)  # no run changed it
    assert not seen.covers("a", torch.tensor([1, 2]), torch.tensor([1, 3]))  # whole numbers are not rounded
    still = Noise(lambda: values(a=[1.0, -2.0]))
    assert not still.covers("a", a, b)
