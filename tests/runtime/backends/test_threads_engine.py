"""Autograd's engine has one thread for each accelerator, and the backward of a pipeline must not wait in it for itself.

The engine is torch's own, with a made-up accelerator.
"""

from __future__ import annotations

import signal
import threading

import pytest
import torch

from tests.support.programs import Program

SCRIPT = """
import contextlib, sys
from unittest import mock
import torch
from torch import nn
import fxsplit
from tests.support.accelerator import use_accelerator
from tests.support.models import FAST

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()
x = torch.randn(8, 8, dtype=torch.float64)
with use_accelerator(engine_threads=True) as record:
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    if "mutant" in sys.argv:
        left_out = mock.patch.object(torch.autograd, "set_multithreading_enabled", lambda on: contextlib.nullcontext())
        left_out.start()
    x = x.to("toy:0")
    pipe = fxsplit.compile(model.to("toy:0"), ["toy:0"] * 2, example_inputs=x, n_microbatches=4, passes=FAST)
    loss = pipe(x).square().sum()
    print("forward", flush=True)
    loss.backward()
    print("backward", all(torch.allclose(p.grad.cpu(), e) for p, e in zip(model.parameters(), expected)), flush=True)
    pipe.close()
    record.check()
    print("ordered", flush=True)
"""
"""The loop of the README's first example, on one accelerator."""


def run(*arguments: str, limit_s: float) -> str:
    """Return the script's output; "killed" is appended if its backward takes longer than `limit_s` seconds."""
    with Program(SCRIPT, *arguments) as program:
        # On a busy machine the script takes longer to its backward than a backward that ends.
        printed = program.read_line() + "\n"
        timer = threading.Timer(limit_s, program.send_signal, (signal.SIGKILL,))
        timer.start()
        done = program.finish()
        timer.cancel()
        return printed + (done.out if done.code == 0 else f"{done.out}killed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch knows one kind of accelerator at a time")
def test_a_backward_of_the_callers_waits_for_workers_and_not_for_itself() -> None:
    assert run(limit_s=120.0).split("\n") == ["forward", "backward True", "ordered", ""]


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch knows one kind of accelerator at a time")
def test_it_would_hang_if_workers_used_the_engines_thread() -> None:
    assert run("mutant", limit_s=20.0) == "forward\nkilled"
