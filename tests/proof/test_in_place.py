"""Writes in place: into buffers, inputs, parts of containers, and memory that two modes share differently."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.api.verify.compare import compare, run_pipeline_step, run_unsplit_step
from fxsplit.frontend.capture import capture
from fxsplit.passes import Profile
from fxsplit.torch_internals.fake.runnable import make_runnable
from tests.support.models import FAST

mse = F.mse_loss
ROWS = 12
# Some of these models write values of all rows of a microbatch to a buffer, and read them back.
pytestmark = pytest.mark.filterwarnings("ignore:the rows of output 0 of .* depend on each other")


def vectors(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 8, dtype=torch.float64)


class WritesDropped(nn.Module):
    """The output of dropout is a copy in training, and its very input in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(1.0)  # the only rate that draws nothing random and still copies

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.b(self.drop(h).mul_(3.0))
        result: Tensor = self.c(torch.tanh(y)) + h
        return result


class DropsInPlace(nn.Module):
    """In-place dropout writes in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(1.0, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        dropped = self.drop(h)
        result: Tensor = self.c(torch.tanh(self.b(torch.tanh(dropped)))) + h
        return result


class WritesAPart(nn.Module):
    """Writes to one chunk of its input, and then joins all chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.chunk(2, 1)
        early = self.a(parts[0].mul_(3.0))
        result: Tensor = self.b(torch.tanh(early)) + torch.cat(parts, 1)
        return result


class CountsWithOperators(nn.Module):
    """`+=` on a name for a buffer writes to the buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        count = self.count
        count += 1
        count *= 1.5
        h = self.a(x)
        h /= 2
        h -= 0.25
        result: Tensor = self.b(torch.tanh(h)) * count.detach().clone()
        return result


class SavesWhatItWrites(nn.Module):
    """A buffer that each microbatch writes, although the backward of the microbatch before still needs it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.mean.mul_(0.9).add_(x.detach().mean(dim=0))
        x = torch.tanh(x * self.mean)
        result: Tensor = self.d(torch.tanh(self.c(torch.tanh(self.b(x)))))
        return result


class ReadsStatistics(nn.Module):
    """Saves running statistics for backward, which batch norm's kernel or a user's module writes in each forward."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c, self.d = nn.Linear(8, 8), norm, *(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.a(x)) * self.norm.running_mean)
        result: Tensor = self.d(torch.tanh(self.c(torch.tanh(self.b(x)))))
        return result


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        self.running_mean.mul_(0.9).add_(x.detach().mean(0))
        return x * self.running_mean


class WritesThroughData(nn.Module):
    """Writes a buffer through `.data`, hidden from autograd, and one by a kernel that counts no version."""

    mean: Tensor
    other: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        for name in ("mean", "other", "var"):
            self.register_buffer(name, torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.mean.data.mul_(0.9).add_(x.detach().mean(0))
        x = F.batch_norm(x * self.mean, self.other, self.var, training=self.training)
        result: Tensor = self.c(torch.tanh(self.b(torch.tanh(x)))) * self.var
        return result


class SquaresThenWrites(nn.Module):
    """Takes statistics without a gradient, then overwrites their input by an in-place activation."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.mean.copy_(h.pow(2).mean(0).detach())
        result: Tensor = self.b(torch.relu_(h))
        return result


class Detaches(nn.Module):
    """Detaches a value from autograd in place: later readers must see that."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.detach_()
        result: Tensor = self.c(torch.tanh(self.b(torch.tanh(h))))
        return result


MORE = [lambda: ReadsStatistics(nn.BatchNorm1d(8)), lambda: ReadsStatistics(OwnNorm(8))]
MODELS = [WritesDropped, DropsInPlace, WritesAPart, CountsWithOperators, SavesWhatItWrites, *MORE]
MODELS += [WritesThroughData, SquaresThenWrites, Detaches]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("train_first", [True, False])
@pytest.mark.parametrize("devices", [2, 3])
def test_both_modes_equal_the_model(model: Callable[[], nn.Module], train_first: bool, devices: int) -> None:
    torch.manual_seed(0)
    split = model().double()
    x, y = vectors(), vectors()
    with fxsplit.compile(split, devices, n_microbatches=3, loss_fn=mse, passes=FAST) as pipe:
        for training in (train_first, not train_first, train_first):
            pipe.train(training)
            unsplit = copy.deepcopy(split)
            if training:
                expected = run_unsplit_step(unsplit, [x.clone()], y, mse, 3)
                found = compare(run_pipeline_step(pipe, [x], y), expected)
                assert found.largest <= 1e-10, f"{found} at {found.worst}"
                pipe.zero_grad()
            else:
                wanted = torch.cat([unsplit(piece.clone()) for piece in x.split(4)])
                with torch.no_grad():
                    torch.testing.assert_close(pipe(x), wanted)


def test_autograd_through_the_call_sees_the_same_buffers() -> None:
    """All forwards run before any backward: saved values of each microbatch must outlive the later writes."""
    split = SavesWhatItWrites().double()
    unsplit = copy.deepcopy(split)
    x, y = vectors(), vectors()
    with fxsplit.compile(split, 2, n_microbatches=3, passes=FAST) as pipe:
        mse(pipe(x), y).backward()
    expected = run_unsplit_step(unsplit, [x], y, mse, 3)
    for name, parameter in split.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.gradients[name])


def test_a_differentiable_input_may_be_written_in_place() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    found, wanted = vectors().requires_grad_(), vectors().requires_grad_()
    with torch.no_grad():
        wanted.copy_(found)
    with fxsplit.compile(model, 2, n_microbatches=3, passes=FAST) as pipe:
        pipe(found * 1).sum().backward()
    model(wanted * 1).sum().backward()
    torch.testing.assert_close(found.grad, wanted.grad)


class FillsAnIndex(nn.Module):
    """An index that is valid only after it has been written: a profiler that skips the write would crash."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.table = nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        index = (x[:, 0] * 0).long() + 1_000_000
        index.fill_(3)
        result: Tensor = self.b(torch.tanh(self.a(x))) + self.table(index)
        return result


class SolvesWithAView(nn.Module):
    """A matrix becomes positive definite only by a write through a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        gram = h.unsqueeze(2) * h.unsqueeze(1) * 0.0
        gram.diagonal(dim1=1, dim2=2).add_(2.0)
        result: Tensor = self.b(torch.linalg.cholesky(gram).sum(dim=1) + h)
        return result


@pytest.mark.parametrize("model", [FillsAnIndex, SolvesWithAView])
def test_the_profiler_shows_readers_what_was_written(model: type[nn.Module]) -> None:
    split = model().double()
    x = vectors()
    with fxsplit.compile(split, 2, example_inputs=x, passes="profile{repeats=2},augment,order,partition,emit") as pipe:
        torch.testing.assert_close(pipe(x), split(x))


def test_weights_on_several_devices_are_observed_in_host_memory() -> None:
    """This happens in the second mode of a model that is spread over GPUs; here a meta tensor is the second device."""
    split = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with make_runnable(split, [torch.zeros(2, 8)], from_shapes=False) as (same, _):
        assert same is split
    meta = nn.Sequential(nn.Linear(8, 8), nn.ReLU().to("meta"))
    meta.register_buffer("elsewhere", torch.empty(0, device="meta"))
    host = pytest.raises(NotImplementedError, match="meta tensor")  # the case under test is a copy to the host
    with host, make_runnable(meta, [torch.zeros(2, 8)], from_shapes=False):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_second_mode_on_two_gpus() -> None:
    split = WritesDropped().cuda(0)
    x = torch.randn(ROWS, 8, device="cuda:0")
    with fxsplit.compile(split, ["cuda:0", "cuda:1"], example_inputs=x, passes=FAST) as pipe:
        pipe(x).sum().backward()
        pipe.eval()
        assert pipe(x).shape == (ROWS, 8)


class GlobalWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(scaled(self.a(x)))
        return result


SCALE = torch.ones(8, dtype=torch.float64, requires_grad=True)


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


torch.fx.wrap("scaled")


def test_a_trained_tensor_outside_of_the_model_is_refused() -> None:
    refused = pytest.raises(
        fxsplit.FxsplitError, match=r"trains a tensor \(float64\[8\]\) that is not one of its parameters"
    )
    with refused:
        fxsplit.compile(GlobalWeight().double(), 2, example_inputs=vectors())


def test_profiling_runs_no_gradient_hooks() -> None:
    split: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    calls: list[str] = []
    split[0].weight.register_hook(lambda g: calls.append("tensor"))
    traced = capture(split, (vectors(),), {}, 4).learn(fxsplit.Machine.of(2))
    Profile(repeats=1)(traced)
    assert calls == []


class Remembers(nn.Module):
    """Writes to a tensor that forward makes, to a tensor that is neither parameter nor buffer, or to a parameter."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.b, self.what = nn.Linear(8, 8), nn.Linear(8, 8), what
        self.plain = torch.zeros(8, dtype=torch.float64)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        self.seen.append(h)
        made = torch.zeros(8, dtype=torch.float64)
        if self.what == "made":
            made += h.detach().mean(0)
        elif self.what == "plain":
            self.plain.add_(h.detach().mean(0))
        elif self.what == "parameter":
            self.a.weight.data.mul_(0.5)
        result: Tensor = self.b(h - made - self.plain)
        return result


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("plain", "writes in place to 'plain', a constant"),
        ("parameter", "forward.. of Remembers writes to parameter 'a.weight'"),
    ],
)
def test_a_write_that_a_graph_would_keep_is_refused_and_undone(what: str, message: str) -> None:
    split = Remembers(what).double()
    before = copy.deepcopy(split.state_dict())
    with pytest.raises(fxsplit.FxsplitError, match=message):
        fxsplit.compile(split, 2, example_inputs=vectors(), passes=FAST)
    assert split.seen == [] and not split.plain.any()
    assert all(torch.equal(before[k], v) for k, v in split.state_dict().items())


def test_an_input_given_twice_stays_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.mul_(2)
            result: Tensor = self.b(self.a(x)) + y
            return result

    split = Twice().double()
    with fxsplit.compile(split, 2, example_inputs=(vectors(), vectors()), passes=FAST) as pipe:
        x = vectors()
        again = x.clone()
        torch.testing.assert_close(pipe(x, x), split(again, again))
