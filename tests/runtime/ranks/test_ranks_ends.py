"""A rank whose program ends, or that is interrupted, is heard of by the others; none waits for it, and none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = '''
import atexit, os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
import fxsplit

class Nap(nn.Module):
    """Sleeps where a file says so: in the stage of one rank, while the other one waits for it."""
    def forward(self, x):
        return nap(x)

def nap(x):
    if os.path.exists("nap"):
        open("napping", "w").close()
        time.sleep(60)
    return x

torch.fx.wrap("nap")

rank, what = int(sys.argv[1]), sys.argv[2]

class Knot:
    """Refers to itself, so that only a search for cycles frees it, as Python's last one at the end of a program."""
    def __init__(self):
        self.own, self.freed = self, os.path.abspath(f"freed-{rank}")
    def __del__(self, open=os.open, flags=os.O_CREAT | os.O_WRONLY):
        open(self.freed, flags)

knot = Knot()
atexit.register(lambda: globals().pop("knot"))
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), Nap(), nn.Linear(8, 8), nn.Linear(8, 3))
x, y = torch.randn(8, 8), torch.randn(8, 3)
passes = "profile{repeats=1},augment,order,partition,emit"
pipe = fxsplit.compile(model, "world", example_inputs=x, n_microbatches=2, loss_fn=F.mse_loss, passes=passes)
print(f"loss {float(pipe.step(x, target=y)):.6f}", flush=True)
if what == "raise" and rank == 1:
    raise ValueError("the data is gone")
if what == "exit" and rank == 1:
    sys.exit(0)
if what == "interrupt":
    open("nap", "w").close()
if what == "kill" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
pipe.step(x, target=y)
print("the step went well", flush=True)
'''
LIMIT_S = 150.0
"""How long programs may take that are to end within two seconds: machines may be busy, and nothing else ends them."""


class Programs:
    """Two ranks of the program, each with files for what it prints."""

    def __init__(self, folder: Path, what: str) -> None:
        (folder / "program.py").write_text(PROGRAM)
        env = {**os.environ, "PYTHONPATH": os.getcwd(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.folder = folder
        self.started = []
        for rank in range(2):
            command = [sys.executable, "program.py", str(rank), what]
            with (folder / f"{rank}.out").open("w") as out, (folder / f"{rank}.err").open("w") as error:
                self.started.append(subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=error))

    def finish(self) -> list[tuple[int, str, str]]:
        """Return the exit code, standard output and standard error of each program, within a limit."""
        until = time.monotonic() + LIMIT_S
        try:
            codes = [one.wait(max(until - time.monotonic(), 0)) for one in self.started]
        finally:
            for one in self.started:
                one.kill()
                one.wait()
        texts = [[(self.folder / f"{rank}.{kind}").read_text() for kind in ("out", "err")] for rank in range(2)]
        return [(code, out, error) for code, (out, error) in zip(codes, texts, strict=True)]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise", "ValueError: the data is gone"),
        ("exit", "RankError: rank 1 of 2 has left: its program has ended, and it makes no more calls"),
        ("kill", "RankError: rank 1 of 2 has left: its program has ended without a word"),
    ],
)
def test_a_program_that_ends_between_steps_ends_the_others(what: str, said: str, tmp_path: Path) -> None:
    (code, out, error), (code_1, out_1, error_1) = Programs(tmp_path, what).finish()
    assert out == out_1 and out.startswith("loss ")
    assert code == 1 and code_1 == {"raise": 1, "exit": 0, "kill": -signal.SIGKILL}[what], error_1
    assert said in error.splitlines()[-1], error
    # To look for cycles in all that torch has loaded takes a second, and others wait for whoever ends with an error.
    assert [(tmp_path / f"freed-{rank}").exists() for rank in range(2)] == [False, what == "exit"]


@pytest.mark.parametrize("pressed_for", [[0, 1], [0]], ids=["all", "one"])
def test_an_interrupt_ends_every_rank(pressed_for: list[int], tmp_path: Path) -> None:
    """One of them computes, and the other one waits for it inside of torch."""
    programs = Programs(tmp_path, "interrupt")
    until = time.monotonic() + LIMIT_S
    while not (tmp_path / "napping").exists() and time.monotonic() < until:
        time.sleep(0.05)
    for rank in pressed_for:
        programs.started[rank].send_signal(signal.SIGINT)
    for rank, (code, out, error) in enumerate(programs.finish()):
        assert out.count("\n") == 1, "no second step went well"
        assert code != 0
        assert ("KeyboardInterrupt" if rank in pressed_for else "RankError") in error.splitlines()[-1], error
        assert not (tmp_path / f"freed-{rank}").exists(), "it ended soon"
