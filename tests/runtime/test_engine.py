"""The engine: forks, reentrant calls, and steps that are given up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import fxsplit
from fxsplit.errors import ClosedError, FxsplitError
from fxsplit.ir.facts.chunks import Cut
from fxsplit.runtime.engine import join_gradients
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
