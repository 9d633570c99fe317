"""If a rank's program ends, or is interrupted, the other ranks notice: none waits for it, and none is left running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.programs import Done, Program

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
    end("in a step")
    if os.path.exists("nap"):
        open("napping", "w").close()
        time.sleep(60)
    return x

torch.fx.wrap("nap")

rank, what, where = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]

def end(here):
    """End this program here, if it is told to, and leave a file that says which rank it is."""
    if where != here or not os.path.exists(f"begun-{rank}") or (here == "between steps" and rank == 0):
        return
    open(f"ended-{rank}", "w").close()
    if what == "raise":
        raise ValueError("the data is gone")
    if what.startswith("exit"):
        sys.exit(int(what[4:] or 0))
    if what.startswith("_exit"):
        os._exit(int(what[5:] or 0))
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))

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
open(f"begun-{rank}", "w").close()
end("between steps")
if what == "interrupt":
    open("nap", "w").close()
rows = 4 if what == "differ" and rank == 1 else 8
pipe.step(x[:rows], target=y[:rows])
print("the step went well", flush=True)
'''
SECOND_STEP = PROGRAM.splitlines().index("pipe.step(x[:rows], target=y[:rows])") + 1
"""The line of the program that its ranks are at when one of them ends."""
LIMIT_S = 150.0
"""The time limit in seconds of programs that should end within two: machines may be busy, and nothing else ends them.
"""


class Programs:
    """Two ranks of the program, each with files for its output."""

    def __init__(self, folder: Path, what: str, where: str = "") -> None:
        (folder / "program.py").write_text(PROGRAM)
        self.started = start_ranks(folder, PROGRAM, what, where)

    def finish(self) -> list[Done]:
        """Return the exit code, standard output and standard error of each program, within a limit."""
        return finish_ranks(self.started)


def start_ranks(folder: Path, code: str, *arguments: str) -> list[Program]:
    """Start a program on two ranks, in a folder."""
    envs = [{"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank)} for rank in range(2)]
    return [Program(code, *arguments, cwd=folder, name="program.py", env=env) for env in envs]


def finish_ranks(started: list[Program]) -> list[Done]:
    """Wait for programs, within a limit."""
    until = time.monotonic() + LIMIT_S
    with contextlib.ExitStack() as stack:
        for one in started:
            stack.enter_context(one)
        return [one.finish(max(until - time.monotonic(), 0)) for one in started]


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("raise", 1, "ValueError: the data is gone"),
        pytest.param(
            "exit",
            0,
            "RankError: rank 1 of 2 has left: its program has ended, and it makes no more calls",
            marks=pytest.mark.long,
        ),
        ("SIGKILL", -signal.SIGKILL, "RankError: rank 1 of 2 has left: its program has ended without a message"),
        pytest.param(
            "SIGSEGV", -signal.SIGSEGV, "rank 1 of 2 has left: its program has ended without", marks=pytest.mark.long
        ),
        pytest.param("exit3", 3, "rank 1 of 2 has left: its program has ended, and", marks=pytest.mark.long),
        pytest.param("_exit3", 3, "rank 1 of 2 has left: its program has ended without", marks=pytest.mark.long),
    ],
)
def test_a_program_that_ends_between_steps_ends_the_others(what: str, code: int, said: str, tmp_path: Path) -> None:
    (code_0, out, error), (code_1, out_1, error_1) = Programs(tmp_path, what, "between steps").finish()
    assert out == out_1 and out.startswith("loss ")
    assert code_0 == 1 and code_1 == code, error_1
    assert said in error.splitlines()[-1], error
    # One error has one traceback, on the rank that raised it. The other rank names only its own line.
    assert "Traceback" not in error and error.splitlines()[-1].endswith(f'program.py", line {SECOND_STEP})'), error
    assert error_1.count("Traceback") == (what == "raise")
    # A search of all torch's objects for cycles takes a second, and other ranks wait for a rank that ends with an
    # error.
    assert [(tmp_path / f"freed-{rank}").exists() for rank in range(2)] == [False, what.startswith("exit")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("exit3", 3, "RankError: rank {} of 2 has raised SystemExit: 3"),
        ("_exit0", 0, "RankError: rank {} of 2 has left: its program has ended without a message"),
        ("SIGSEGV", -signal.SIGSEGV, "RankError: rank {} of 2 has left: its program has ended without a message"),
    ],
)
def test_a_program_that_ends_in_a_step_ends_the_others(what: str, code: int, said: str, tmp_path: Path) -> None:
    found = Programs(tmp_path, what, "in a step").finish()
    (ended,) = [rank for rank in range(2) if (tmp_path / f"ended-{rank}").exists()]
    assert found[ended][0] == code, found[ended][2]
    other, out, error = found[1 - ended]
    assert other == 1 and out.count("\n") == 1, "its second step did not go well"
    assert said.format(ended) in error.splitlines()[-1], error


@pytest.mark.long
@pytest.mark.parametrize(("what", "code"), [("SIGSEGV", -signal.SIGSEGV), ("exit3", 3), ("_exit0", 0)])
def test_a_launcher_ends_all_ranks_and_says_how_one_has_ended(what: str, code: int, tmp_path: Path) -> None:
    """The launcher names the rank that ended first, and its exit code; the other rank prints the error it received.

    To the launcher, a rank that exits with 0 has succeeded. A rank that exits with another number takes a moment to
    end.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(
        [*launcher, "program.py", what, "between steps"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert run.returncode == 1 and (tmp_path / "ended-1").exists()
    cause = run.stderr.partition("Root Cause")[2]
    told = "rank      : 1 " in cause and f"exitcode  : {code} " in cause
    heard = "RankError: rank 1 of 2 has left: its program has ended" in run.stderr and "rank      : 0 " in cause
    assert (told and code) or (heard and "exitcode  : 1 " in cause), run.stderr


@pytest.mark.long
def test_an_error_of_all_ranks_has_one_traceback_too(tmp_path: Path) -> None:
    (code, _, error), (code_1, _, error_1) = Programs(tmp_path, "differ").finish()
    assert code == code_1 == 1 and "Traceback" in error and "Traceback" not in error_1
    for text in (error, error_1):
        assert "RanksDiffer: rank 1 has inputs of other shapes" in text.splitlines()[-1], text


BY_THEMSELVES = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
import fxsplit

rank, what = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 4)

def fail(outputs, target):
    raise ValueError("label out of range")

schedule = "1f1b" if what in ("all", f"rank {rank}") else "1F1B"
pipe = fxsplit.compile(model, "world", schedule=schedule, loss_fn=fail, n_microbatches=2)
try:
    pipe.step(x, target=x)
except Exception as error:
    if what == "wrapped":
        raise RuntimeError(f"step 0 failed") from error
    raise
"""


def run_both(folder: Path, what: str) -> list[str]:
    """Return what each of two ranks writes to standard error until its program has failed."""
    (folder / "program.py").write_text(BY_THEMSELVES)
    done = finish_ranks(start_ranks(folder, BY_THEMSELVES, what))
    assert [one.code for one in done] == [1, 1], done
    return [one.error for one in done]


def test_a_wrong_option_on_every_rank_has_one_traceback(tmp_path: Path) -> None:
    """Each rank found it by itself, and showed it with a traceback of its own."""
    brief, whole = sorted(run_both(tmp_path, "all"), key=len)
    assert whole.count("Traceback") == 1 and "ScheduleError: unknown schedule '1f1b'" in whole.splitlines()[-1]
    assert "Traceback" not in brief and "has raised ScheduleError: unknown schedule '1f1b'" in brief.splitlines()[-1]


@pytest.mark.long
def test_a_wrong_option_on_one_rank_has_its_traceback(tmp_path: Path) -> None:
    said = run_both(tmp_path, "rank 1")
    assert "Traceback" in said[1] and "ScheduleError: unknown schedule '1f1b'" in said[1].splitlines()[-1]
    assert "Traceback" not in said[0] and "rank 1 of 2 has raised ScheduleError" in said[0].splitlines()[-1]


def test_an_error_that_the_program_wraps_has_one_chain(tmp_path: Path) -> None:
    """Each rank showed the error of another one, and from it the program's own, with a traceback for both."""
    brief, whole = sorted(run_both(tmp_path, "wrapped"), key=len)
    assert "label out of range" in whole and "RuntimeError: step 0 failed" in whole.splitlines()[-1]
    last = brief.splitlines()[-1]
    assert "Traceback" not in brief and "label out of range" in last and "raised again as RuntimeError: step 0" in last


@pytest.mark.parametrize(
    "pressed_for", [pytest.param([0, 1], marks=pytest.mark.long, id="all"), pytest.param([0], id="one")]
)
def test_an_interrupt_ends_every_rank(pressed_for: list[int], tmp_path: Path) -> None:
    """One rank computes, and the other waits for it inside torch."""
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
