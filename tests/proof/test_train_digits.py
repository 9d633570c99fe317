"""examples/train_digits.py: the same losses on any number of devices and ranks, and after losing a rank or a host."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from fxsplit.api.checkpoint.checkpoint import latest_checkpoint

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "train_digits.py")
LIMIT_S = 900


def make_environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # If the test is itself one of several ranks, its own variables of that name must not be inherited.
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def launch(n: int, *options: str, restarts: int = 0) -> list[str]:
    """Return the command that starts the example on n ranks, at a free port."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    return [*run, f"--max-restarts={restarts}", SCRIPT, *options]


def run(*command: str) -> list[str]:
    """Return the lines that a command prints; the command must succeed, and print only steps."""
    done = subprocess.run(command, env=make_environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@cache
def run_unbroken(steps: int) -> tuple[str, ...]:
    """Return the lines of a run from the first step to the last, on as many devices as the example has by default."""
    return tuple(run(sys.executable, SCRIPT, "--steps", str(steps)))


@pytest.mark.long
def test_losses_of_ranks_are_those_of_devices() -> None:
    expected = run(sys.executable, SCRIPT, "--steps", "4", "--devices", "2")
    assert [line.split()[:3] for line in expected] == [["step", str(i), "loss"] for i in range(1, 5)]
    assert all(len(line.split()[3].partition(".")[2]) == 9 for line in expected)
    assert run(*launch(3, "--steps", "4")) == expected


@pytest.mark.long
def test_it_goes_on_on_other_devices(tmp_path: Path) -> None:
    """Saved on three ranks, resumed on one device."""
    expected = run(sys.executable, SCRIPT, "--steps", "6", "--devices", "3")
    folder = str(tmp_path / "runs")
    assert run(*launch(3, "--steps", "4", "--checkpoint", folder, "--resume")) == expected[:4]
    assert latest_checkpoint(folder) == tmp_path / "runs" / "step-4"
    options = ("--checkpoint", folder, "--resume", "--devices", "1")
    assert run(sys.executable, SCRIPT, "--steps", "6", *options) == expected[4:]
    assert run(sys.executable, SCRIPT, "--steps", "6", *options) == []
    done = subprocess.run(
        [sys.executable, SCRIPT, "--checkpoint", folder], env=make_environment(), capture_output=True, text=True
    )
    assert done.returncode == 2 and "go on with --resume" in done.stderr and not done.stdout


def find_rank(launcher: int, rank: int) -> int:
    """Return the process of a rank that a launcher has started."""
    for number in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}" in Path(f"/proc/{number}/environ").read_text().split("\0"):
            return int(number)
    raise AssertionError(f"no rank {rank} below {launcher}")


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="ranks are found in /proc, which Linux has")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_comes_back_with_the_same_losses(tmp_path: Path, rank: int) -> None:
    expected = run_unbroken(12)
    options = ("--steps", "12", "--checkpoint", str(tmp_path), "--resume")
    with (tmp_path / "errors").open("w") as errors:
        command = launch(2, *options, restarts=2)
        with subprocess.Popen(
            command, env=make_environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            # Ends all ranks if the launcher hangs.
            limit = threading.Timer(LIMIT_S, process.terminate)
            limit.start()
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                if line.startswith("step 5 ") and len(lines) == 5:
                    os.kill(find_rank(process.pid, rank), signal.SIGKILL)
            code = process.wait()
            limit.cancel()
    assert code == 0, (tmp_path / "errors").read_text()[-4000:]
    # Steps after the newest complete checkpoint are repeated.
    assert len(lines) > 6 and set(lines) == set(expected) and lines[-1] == expected[-1]


def start_agent(port: int, folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Start a launcher with one rank, in place of a host; the launchers meet at a port."""
    session = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--local-addr=localhost"]
    # A launcher waits so long for the other one: without it, the first world would have one rank, and end at once.
    session += ["--rdzv-conf=last_call_timeout=30", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
    options = ["--steps", "40", "--checkpoint", str(folder / "runs"), "--resume"]
    command = [sys.executable, "-m", "torch.distributed.run", *session, SCRIPT, *options]
    with (folder / f"{name}.out").open("w") as out, (folder / f"{name}.err").open("w") as errors:
        return subprocess.Popen(command, env=make_environment(), stdout=out, stderr=errors)


def wait_until(is_so: Callable[[], bool], folder: Path, *agents: subprocess.Popen[bytes]) -> None:
    """Wait until something is so; fail with what the launchers said if one of them ends before, or time is up."""
    until = time.monotonic() + LIMIT_S
    while not is_so():
        ended = [agent.args for agent in agents if agent.poll() is not None]
        told = [path.read_text()[-4000:] for path in sorted(folder.glob("*.err"))]
        assert not ended and time.monotonic() < until, (ended, told)
        time.sleep(0.05)


def accepts(port: int) -> bool:
    with socket.socket() as link:
        return link.connect_ex(("localhost", port)) == 0


@pytest.mark.long
def test_a_world_that_becomes_smaller_plans_anew_and_goes_on(tmp_path: Path) -> None:
    """One of two launchers is ended. The other restarts its rank, now in a world of one, with the saved costs."""
    expected = run(sys.executable, SCRIPT, "--steps", "40", "--devices", "1")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def read() -> list[str]:
        return [line for name in ("stays", "goes") for line in (tmp_path / f"{name}.out").read_text().splitlines()]

    stays = start_agent(port, tmp_path, "stays")
    # The first launcher there keeps the store through which they meet.
    wait_until(lambda: accepts(port), tmp_path, stays)
    goes = start_agent(port, tmp_path, "goes")
    try:
        wait_until(lambda: len(read()) >= 5, tmp_path, stays, goes)
        goes.terminate()
        assert stays.wait(LIMIT_S) == 0, (tmp_path / "stays.err").read_text()[-4000:]
    finally:
        for agent in (stays, goes):
            agent.terminate()
            agent.wait(LIMIT_S)
    plans = {len(json.loads(path.read_text())["stages"]) for path in (tmp_path / "runs").glob("step-*/plan.json")}
    assert plans == {1} and len(read()) > 5
    assert set(read()) == set(expected), "the same losses, some of them twice"
