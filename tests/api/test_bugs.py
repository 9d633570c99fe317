"""Things that were wrong once, or are wrong in other tools: each must be right or refused, never silently different."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.api.compare import compare, run_pipeline_step, run_unsplit_step
from fxsplit.errors import BrokenFact, FxsplitError, InputError, PlanError, TraceError
from tests.models import FAST, Mlp, Residual

mse = F.mse_loss
compiled: Any = fxsplit.compile  # called with what a type checker would refuse
device: Any = fxsplit.Device


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


class RunningMean(nn.Module):
    """Updates a buffer in the first layer and reads it in the last: a later microbatch must not overtake the reader."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.mean.mul_(0.9).add_(x.detach().mean(dim=0))
        result: Tensor = self.c(torch.tanh(self.b(torch.tanh(x)))) * self.mean
        return result


class ReadsNorm(nn.Module):
    """Reads the statistics that batch norm writes, in another node."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(x) + self.norm.running_mean)
        result: Tensor = self.b(torch.tanh(self.a(x)))
        return result


@pytest.mark.parametrize("model", [RunningMean, ReadsNorm])
def test_a_written_buffer_is_read_in_time(model: type[nn.Module]) -> None:
    split = model().double()
    x, y = vectors(64).double(), vectors(64).double()
    with fxsplit.compile(split, 2, example_inputs=x, n_microbatches=16, loss_fn=mse, passes=FAST) as pipe:
        for _ in range(5):
            expected = run_unsplit_step(copy.deepcopy(split), [x], y, mse, 16)
            found = compare(run_pipeline_step(pipe, [x], y), expected)
            assert found.largest <= 1e-10, f"{found} at {found.worst}"
            pipe.zero_grad()


class Modes(nn.Module):
    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.a, self.b, self.mode = nn.Linear(8, 8), nn.Linear(8, 8), mode

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            x = self.a(x)
        result: Tensor = self.b(x.float())
        return result


@pytest.mark.parametrize("mode", [torch.no_grad, partial(torch.autocast, "cpu", torch.bfloat16)])
def test_modes_inside_forward_are_kept(mode: Any) -> None:
    """A symbolic trace does not record them: it would train what the model freezes, or compute in another type."""
    model, x = Modes(mode), vectors().float()
    unsplit = copy.deepcopy(model)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=1, passes=FAST) as pipe:
        assert pipe.front_end == "export"
        assert torch.equal(pipe(x), unsplit(x))
        pipe(x).sum().backward()
    unsplit(x).sum().backward()
    for a, b in zip(model.parameters(), unsplit.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-5)  # type: ignore[arg-type]


class Assigns(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        result: Tensor = self.b(self.a(x)) * self.count
        return result


class CachesShape(Assigns):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        self.calls += 1
        result: Tensor = self.b(self.a(x))
        return result


def test_an_assigned_buffer_is_refused_and_the_model_left_as_it_was() -> None:
    model = Assigns()
    with pytest.raises(TraceError, match=r"assigns to 'count'.*self.count.add_"):
        fxsplit.compile(model, 2, example_inputs=vectors())
    assert (
        isinstance(model.count, Tensor) and model.count.item() == 0 and isinstance(model.state_dict()["count"], Tensor)
    )
    model(vectors())


def test_attributes_that_forward_sets_are_restored() -> None:
    model = CachesShape()
    with fxsplit.compile(model, 2, example_inputs=vectors(), passes=FAST):
        assert model.calls == 0 and not hasattr(model, "last")


def test_second_derivatives_are_refused() -> None:
    x = vectors().requires_grad_()
    with (
        fxsplit.compile(Mlp(), 2, passes=FAST) as pipe,
        pytest.raises(RuntimeError, match="cannot be differentiated again"),
    ):
        torch.autograd.grad(pipe(x).sum(), x, create_graph=True)


def test_a_loss_without_a_graph_is_refused() -> None:
    for loss_fn, frozen in ((lambda o, t: mse(o.detach(), t), False), (mse, True)):
        model = Mlp().requires_grad_(not frozen)
        with (
            fxsplit.compile(model, 2, loss_fn=loss_fn, passes=FAST) as pipe,
            pytest.raises(InputError, match="does not depend on anything that wants a gradient"),
        ):
            pipe.step(vectors(), target=torch.zeros(8, 3))


def test_a_replaced_submodule_is_compiled_again() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    x = vectors()
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        model[2] = nn.Linear(8, 2)
        assert pipe(x).shape == (8, 2)
        torch.testing.assert_close(pipe(x), model(x))


def test_hooks_that_would_not_run_are_refused() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3))
    with fxsplit.compile(model, 2, example_inputs=vectors(), loss_fn=mse, passes=FAST) as pipe:
        handle = model[0].register_forward_hook(lambda m, args, out: out * 2)
        with pytest.raises(InputError, match=r"submodule '0' has hooks.*such as '0.0'"):
            pipe(vectors())
        handle.remove()
        handle = model.register_forward_hook(lambda m, args, out: None)
        with pytest.raises(InputError, match="the model itself has hooks"):
            pipe.step(vectors(), target=torch.zeros(8, 3))
        pipe(vectors())


def test_reduction_bound_by_partial() -> None:
    model = Mlp()
    x, y = vectors(7), torch.randint(0, 3, (7,))
    loss_fn = partial(F.cross_entropy, reduction="sum")
    with fxsplit.compile(model, 2, n_microbatches=3, loss_fn=loss_fn, passes=FAST) as pipe:
        torch.testing.assert_close(pipe.step(x, target=y), loss_fn(model(x), y).detach())


def test_a_small_first_batch_does_not_fix_the_number_of_microbatches() -> None:
    calls: list[int] = []
    model = Mlp()
    model.layers[0].register_forward_hook(lambda m, args, out: calls.append(out.shape[0]))
    with fxsplit.compile(model, 2, example_inputs=vectors(1), passes=FAST) as pipe:
        calls.clear()
        pipe(vectors(64))
        assert calls == [16] * 4


def test_checkpointing_around_a_pipeline_does_not_hang() -> None:
    from torch.utils.checkpoint import checkpoint

    x = vectors().requires_grad_()
    with fxsplit.compile(Mlp(), 2, passes=FAST) as pipe:
        out = checkpoint(pipe, x, use_reentrant=False)
        with pytest.raises(FxsplitError, match="a stage of this pipeline calls the pipeline itself"):
            out.sum().backward()
        pipe(x).sum().backward()


@pytest.mark.parametrize("backward", [False, True])
def test_writing_to_the_input_in_place(backward: bool) -> None:
    """Microbatches are views of one tensor: a write to one is not a write to another, nor to the caller's batch."""
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    unsplit = copy.deepcopy(model)
    x = vectors(9).double()
    kept = x.clone()
    with fxsplit.compile(model, 2, n_microbatches=3, loss_fn=mse, passes=FAST) as pipe:
        if backward:
            y = torch.zeros(9, 3, dtype=torch.float64)
            expected = run_unsplit_step(unsplit, [x.clone()], y, mse, 3)
            assert compare(run_pipeline_step(pipe, [x], y), expected).largest <= 1e-10
        else:
            torch.testing.assert_close(pipe(x), unsplit(x.clone()))
    assert torch.equal(x, kept)


def test_no_rows() -> None:
    refused = pytest.raises(InputError, match="give a batch of at least one row")
    with fxsplit.compile(Mlp(), 2, example_inputs=vectors(), passes=FAST) as pipe, refused:
        pipe(torch.zeros(0, 8))


def test_first_calls_from_many_threads() -> None:
    model = Mlp()
    x = vectors()
    results: list[Tensor] = []
    with fxsplit.compile(model, 2, passes=FAST) as pipe:
        threads = [threading.Thread(target=lambda: results.append(pipe(x))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, model(x))


class Coded(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def raise_coded(x: Tensor) -> Tensor:
    if x.shape[0] == 1:
        raise Coded(7)
    return x


torch.fx.wrap("raise_coded")


def test_an_exception_keeps_its_attributes() -> None:
    class Raises(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return raise_coded(super().forward(x))

    with fxsplit.compile(Raises(), 2, example_inputs=vectors(), n_microbatches=2, passes=FAST) as pipe:
        with pytest.raises(Coded) as caught:
            pipe(vectors(3))
        assert caught.value.code == 7


def test_pins_are_kept_or_refused() -> None:
    def pin(stage: int, path: str = "head") -> Any:
        return lambda ir: fxsplit.Pins.add(ir, {path: stage})

    images = torch.randn(8, 3, 8, 8)
    with pytest.raises(BrokenFact, match="pinned to stage 0 and planned on 1: pin before 'partition'"):
        fxsplit.compile(Residual(), 2, example_inputs=images, passes=fxsplit.DEFAULT.after("partition", pin(0)))
    with pytest.raises(PlanError, match="'head' is pinned to stage 0 and to stage 1: keep one"):
        fxsplit.compile(Residual(), 2, example_inputs=images, passes=[pin(0), pin(1), *fxsplit.DEFAULT])
    with pytest.raises(PlanError, match="names no submodule"):
        fxsplit.compile(Residual(), 2, example_inputs=images, passes=[pin(0, ""), *fxsplit.DEFAULT])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fxsplit.Machine.of(2, memory_bytes=0), "memory_bytes=0: give a positive number"),
        (lambda: fxsplit.Machine.of(["cpu"] * 2, bytes_per_s=0), "a link of 0 bytes per second"),
        (lambda: device("a", "cpu"), "torch_device='cpu': give a torch.device"),
        (lambda: device("a", torch.device("cpu"), "2GB"), "'2GB' for memory_bytes or speed"),
        (lambda: fxsplit.Machine((fxsplit.Device("a", torch.device("cpu")),) * 2, (1.0,)), "a name of its own"),
        (lambda: compiled(Mlp(), None), "devices=None: give a number"),
        (lambda: compiled(Mlp(), 2.0), "devices=2.0: give a number"),
        (lambda: compiled(Mlp(), 2, n_microbatches="4"), "n_microbatches='4': give a number"),
        (lambda: compiled(Mlp(), 2, costs=3), "costs=3: give a profile"),
        (lambda: compiled(Mlp(), 2, dump=3), "dump=3: give the path of a folder"),
        (lambda: fxsplit.compile(Mlp(), 2, dump=__file__, example_inputs=vectors()), "cannot dump into"),
        (lambda: compiled(Mlp(), 2, loss_fn=nn.MSELoss), "is no function or module"),
        (lambda: fxsplit.compile(fxsplit.compile(Mlp(), 2), 2), "model is a pipeline already"),
        (lambda: fxsplit.compile(Mlp(), 2, example_inputs=[[1.0]]), "without any tensor.*torch.tensor make one"),
        (lambda: fxsplit.compile(Mlp(), 2, loss_fn=mse).step(vectors()), r"pipe.step\(x, target=y\)"),
    ],
)
def test_more_bad_input(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


class FrozenNorm(nn.Module):
    """Keeps batch norm in evaluation whatever mode is set, and uses a parameter directly."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.norm(self.a(x)) * self.scale)
        return result


def test_train_is_the_models_own() -> None:
    model = FrozenNorm().train()
    with fxsplit.compile(model, 2, example_inputs=vectors(), passes=FAST) as pipe:
        assert pipe.train() is pipe and not model.norm.training
        assert pipe.eval() is pipe and not model.training


def test_a_replaced_parameter_is_used() -> None:
    model = FrozenNorm().train()
    x = vectors()
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        model.scale = nn.Parameter(torch.full((8,), 3.0))
        torch.testing.assert_close(pipe(x), model(x))


def test_step_refuses_an_input_that_wants_a_gradient() -> None:
    with (
        fxsplit.compile(Mlp(), 2, loss_fn=mse, passes=FAST) as pipe,
        pytest.raises(InputError, match="wants a gradient, which step"),
    ):
        pipe.step(vectors().requires_grad_(), target=torch.zeros(8, 3))


INTERRUPT = """
import copy, threading, time, torch, fxsplit
from torch import nn
from fxsplit.progress import listening
model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512)) for _ in range(40)])
before = copy.deepcopy(model.state_dict())
x = torch.randn(2048, 512)
def tell(what, done, total):
    if done == 1:
        print("ready", flush=True)
try:
    with listening(tell):
        fxsplit.compile(model, 2, example_inputs=x, passes="profile{repeats=1000},augment,order,partition,emit")
except KeyboardInterrupt:
    time.sleep(0.5)
    same = all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    print("stopped", same, threading.active_count(), flush=True)
"""


def test_ctrl_c_while_profiling_leaves_the_model_as_it_was() -> None:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPT], stdout=subprocess.PIPE, text=True, env=environment
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline().strip() == "ready"
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline().strip() == "stopped True 1"
        assert program.wait(timeout=30) == 0
