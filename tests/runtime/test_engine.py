"""The engine: forks, reentrant calls, and steps that are given up."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import ClosedError, FxsplitError
from fxsplit.ir.facts.chunks import Cut
from fxsplit.runtime.engine import join_gradients
from tests.accelerator import use_accelerator
from tests.models import FAST, Mlp


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


def test_checkpointing_around_a_pipeline_does_not_hang() -> None:
    """It would be wrong if the recomputation waited for the workers that waited for it."""
    from torch.utils.checkpoint import checkpoint

    x = vectors().requires_grad_()
    with fxsplit.compile(Mlp(), 2, passes=FAST) as pipe:
        out = checkpoint(pipe, x, use_reentrant=False)
        with pytest.raises(FxsplitError, match="a stage of this pipeline calls the pipeline itself"):
            out.sum().backward()
        pipe(x).sum().backward()


def test_a_forked_process_is_told_to_compile_again() -> None:
    x = vectors()
    with fxsplit.compile(Mlp(), 2, example_inputs=x, passes=FAST) as pipe:
        pipe(x)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                pipe(x)
            except ClosedError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert "in the process that forked: compile again" in os.read(read, 1000).decode()
        os.close(read)
        os.close(write)


# A shell starts its background jobs with SIGINT ignored, and Python then installs no handler for it: the program does.
GIVEN_UP = """
import os, signal, threading, time
import torch, fxsplit
from torch import nn

signal.signal(signal.SIGINT, signal.default_int_handler)

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        if slow:
            time.sleep(3.0)
        return g

def slowly(x):
    return Slow.apply(x)
torch.fx.wrap("slowly")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return self.b(slowly(self.a(x)))

slow = False
model, x, y = Net(), torch.randn(4, 8), torch.randn(4, 8)
pipe = fxsplit.compile(model, 2, example_inputs=x, n_microbatches=1, loss_fn=nn.functional.mse_loss)
pipe.step(x, target=y)
before = [p.grad.clone() for p in model.parameters()]
slow = True
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    pipe.step(x, target=y)
except KeyboardInterrupt:
    pass
slow = False
time.sleep(3.0)
same = all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters()))
pipe.step(x, target=y)
twice = all(torch.allclose(2 * a, p.grad) for a, p in zip(before, model.parameters()))
print("untouched", same, "then doubled", twice)
"""


def test_a_backward_given_up_on_changes_no_gradient() -> None:
    """Ctrl-C in a backward longer than the grace: the worker ends it later, into a sum that nobody reads."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", GIVEN_UP], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.stdout.strip() == "untouched True then doubled True", done.stderr


@pytest.mark.parametrize("cut", [Cut(0), Cut(None)])
def test_an_input_gets_its_gradient_on_its_own_device(cut: Cut) -> None:
    """An input elsewhere than the first stage got a gradient on the stage's device, which autograd refuses."""
    like = [torch.empty(2, 3, device="meta")] * 2
    for pieces in ([torch.ones(2, 3)] * 2, [None, torch.ones(2, 3)], [torch.ones(2, 3), None]):
        joined = join_gradients(pieces, like, cut)
        assert joined is not None and joined.device == like[0].device
        assert joined.shape == ((2, 3) if cut.dim is None else (4, 3))
    assert join_gradients([None, None], like, cut) is None


class Normed(nn.Module):
    """Draws, writes statistics, and holds a buffer that nothing writes."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.relu(self.b(self.drop(self.norm(self.a(x * self.scale))))))
        return out


class Own(Normed):
    """Returns its own loss, a mean over the labels that count."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        out = super().forward(x)
        return {"loss": F.cross_entropy(out, labels), "out": out}


def mean_with_labels(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs, target) + 0.1 * outputs.square().mean()


@pytest.mark.parametrize(
    ("loop", "loss_fn", "place", "options"),
    [
        ("step", F.cross_entropy, "toy:1", {}),
        ("step", F.cross_entropy, "toy:0", {}),
        ("step", F.cross_entropy, "cpu", {}),
        ("step", mean_with_labels, "toy:1", {}),
        ("step", F.cross_entropy, "toy:1", {"schedule": "ZB-H1"}),
        ("step", F.cross_entropy, "toy:1", {"recompute": "always"}),
        ("step", F.cross_entropy, "toy:1", {"deferred_batch_norm": True}),
        ("call", None, "toy:1", {}),
        ("call", None, "toy:1", {"recompute": "always", "deferred_batch_norm": True}),
    ],
)
def test_a_warm_batch_waits_for_no_accelerator(loop: str, loss_fn: Any, place: str, options: dict[str, Any]) -> None:
    """The host waited in each step: for the losses' weights, counts of labels, buffers that were compared."""
    with use_accelerator() as record:
        model, x, y = Normed().to("toy:0"), torch.randn(15, 8).to("toy:0"), torch.randint(0, 3, (15,)).to(place)
        given = {"n_microbatches": 4, "example_inputs": x, "loss_fn": loss_fn, "passes": FAST, **options}
        with fxsplit.compile(model, ["toy:0", "toy:1"], **given) as pipe:
            for _ in range(4):
                waits = record.waits.copy()
                if loop == "step":
                    pipe.step(x, target=y)
                else:
                    F.cross_entropy(pipe(x), y).backward()
            assert record.waits == waits
        record.check()


@pytest.mark.parametrize("loop", ["step", "call"])
def test_a_model_that_averages_labels_waits_for_no_accelerator(loop: str) -> None:
    """The host read how many labels count in each microbatch."""
    torch.manual_seed(0)
    model, x, labels = Own(), torch.randn(15, 8), torch.randint(0, 3, (15,))
    model.drop.p = 0.0
    model.norm.eval()
    labels[3:9] = -100  # all of one microbatch
    alone = copy.deepcopy(model)
    expected = alone(x, labels)["loss"]
    expected.backward()
    with use_accelerator() as record:
        given = [t.to("toy:0") for t in (x, labels)]
        options: Any = {"n_microbatches": 4, "example_inputs": tuple(given), "passes": FAST}
        with fxsplit.compile(model.to("toy:0"), ["toy:0", "toy:1"], **options) as pipe:
            for _ in range(2):
                pipe.zero_grad()
                waits = record.waits.copy()
                if loop == "step":
                    loss = pipe.step(*given)
                else:
                    loss = pipe(*given)["loss"]
                    loss.backward()
            assert record.waits == waits
        record.check()
        torch.testing.assert_close(loss.detach().cpu(), expected.detach())
        for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad.cpu(), its.grad)
