"""Run a function in several ranks: processes of their own with a process group and a time limit; none is left running.

    def total(rank: int, world: int, number: int) -> int:
        found = torch.tensor(rank + number)
        dist.all_reduce(found)
        return int(found)

    assert ranks(3, total, 5) == [18, 18, 18]

The function must be at the top of a module, because the ranks find it by its name. A fork server has torch and fxsplit
loaded, so that ranks begin in a tenth of a second. The ranks meet in a file of a temporary folder, and no port is
fixed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fxsplit.frontend.capture import LATE
from fxsplit.runtime.ranks.failures.guard import _end_started
from fxsplit.torch_internals.autograd import split as grad_split
from fxsplit.torch_internals.autograd import sums as gradient_sums
from tests.support.times import state_times

PRELOADED = [
    "pytest",
    "numpy.ma",
    "rich.console",
    "rich.table",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining.schedules",
    "torch._inductor.sizevars",
    "fxsplit.api.compile",
    "fxsplit.api.pipeline.pipeline",
    "fxsplit.ir.fingerprint",
    "fxsplit.ir.text.fx_graph",
    *LATE,
]
START_S = 120.0
"""How long ranks may take to meet if a fork server is new and loads torch on a busy machine."""
BEGUN = b"begun"
"""A rank's message once it is in the process group, before the function runs."""
GO = b"go"
"""The message to every rank once all of them are in the process group."""
GRACE_S = 1.0
"""How long the other ranks may still report their errors, once one of them has raised."""
DUMP_S = 30.0
"""How long ranks may take to write their stacks down before they are killed; a busy machine is slow in it."""
OUTERMOST = "in <module>"
"""The outermost frame of the main thread, which is written last."""
SHOWN = 6000
"""How many characters of a rank's output a failing test shows."""


class RankFailed(AssertionError):
    """A rank took longer than its limit, died, or raised an error that cannot be pickled."""


def ranks(
    n: int, function: Callable[..., Any], *args: Any, limit_s: float = 240, dying: Collection[int] = ()
) -> list[Any]:
    """Run `function(rank, n, *args)` in n ranks, which have a process group on gloo, and return their results.

    limit_s: after this time every rank is killed; RankFailed then shows the stacks of all their threads. The limit is
    for ranks that hang: on a busy machine a first compile may take more than a minute.
    dying: ranks that are meant to end without a word, as by a signal; their result is their exit code.

    The exception that was raised first is raised here, with its rank in a note. Afterwards no rank is alive.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, contextlib.ExitStack() as stack:
        started: list[_Rank] = []
        stack.callback(_end, started)
        for rank in range(n):
            here, there = context.Pipe()
            process = context.Process(target=_run, args=(rank, n, folder, limit_s, there, function, args))
            process.start()
            started.append(_Rank(rank, n, process, here, Path(folder, f"{rank}.txt")))
            # Only the rank keeps this end open, so that its death is noticed at once.
            there.close()
        # Ranks wait until the server has loaded torch, and for each other; this time does not count for the function.
        for one in started:
            if not one.link.poll(START_S):
                raise RankFailed(f"rank {one.rank} of {n} has not begun within {START_S} s")
            one.listen()
        # A rank that dies at once must not break the connections of a rank that is still making them.
        for one in started:
            with contextlib.suppress(OSError):
                one.link.send_bytes(GO)
        return _gather(started, time.monotonic() + limit_s, limit_s, dying)


def end_by_error(error: Exception) -> None:
    """End this rank's program like a process of torch's spawn(): with an exit code, after its error was recorded."""
    with contextlib.suppress(SystemExit):
        try:
            raise error
        except Exception:
            try:
                sys.exit(1)
            finally:
                _end_started()


class _Rank:
    """One rank, as the test sees it."""

    def __init__(self, rank: int, n: int, process: Any, link: Connection, log: Path) -> None:
        self.rank, self.n, self.process, self.link, self.log = rank, n, process, link, log
        self.result: tuple[str, float, bytes, str] | None = None
        """The rank's answer: its kind, its time, the pickled value, and a traceback."""
        self.over = False

    def listen(self) -> None:
        """Receive the rank's message, or note that the rank is gone."""
        try:
            sent = self.link.recv_bytes()
            if sent == BEGUN:
                return
            self.result = pickle.loads(sent)
        except (EOFError, OSError):
            # The exit code comes through the fork server, which may take a while on a busy machine.
            self.process.join(DUMP_S)
        self.over = True

    def print_log(self) -> str:
        """Return the end of the rank's output."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"--- rank {self.rank} of {self.n} printed:\n{text[-SHOWN:]}" if text else ""

    def unpack_error(self) -> BaseException:
        """Return the rank's error, or a RankFailed that says how it died."""
        if self.result is None:
            return RankFailed(f"rank {self.rank} of {self.n} died (exit code {self.process.exitcode})")
        _, _, packed, text = self.result
        error: BaseException = (
            pickle.loads(packed) if packed else RankFailed(f"rank {self.rank} of {self.n} raised\n{text}")
        )
        error.add_note(f"raised by rank {self.rank} of {self.n}:\n{text}")
        return error


def _gather(started: list[_Rank], until: float, limit_s: float, dying: Collection[int]) -> list[Any]:
    """Return the results of all ranks; raises the first exception, or RankFailed at the limit."""
    # A rank that could not join the process group is over already.
    failed = [rank for rank in started if rank.over]
    while waiting := [rank for rank in started if not rank.over]:
        ready = wait([rank.link for rank in waiting], max(until - time.monotonic(), 0))
        if not ready:
            break
        for rank in waiting:
            if rank.link in ready:
                rank.listen()
                if (rank.result[0] != "returned") if rank.result else rank.rank not in dying:
                    failed.append(rank)
        if failed:
            until = min(until, time.monotonic() + GRACE_S)
    logs = [rank.print_log() for rank in started]
    if failed:
        # A death is noticed at once, so it came first; other ranks' errors are ordered by their clocks.
        first = min(failed, key=lambda rank: rank.result[1] if rank.result else 0.0)
        error = first.unpack_error()
        for text in (*(r.result[3] for r in failed if r is not first and r.result), *logs):
            error.add_note(text)
        raise error
    if waiting:
        late = ", ".join(str(rank.rank) for rank in waiting)
        raise RankFailed(f"ranks {late} took longer than {limit_s} s:\n{_dump(waiting)}")
    return [pickle.loads(r.result[2]) if r.result else r.process.exitcode for r in started]


def _dump(waiting: list[_Rank]) -> str:
    """Return the stacks of all threads of these ranks."""
    for rank in waiting:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    end = time.monotonic() + DUMP_S
    # The handler is written in C and writes at once, unless the process is stopped or waits for a processor.
    while time.monotonic() < end and not all(OUTERMOST in rank.print_log() for rank in waiting):
        time.sleep(0.05)
    return "\n".join(rank.print_log() or f"--- rank {rank.rank} of {rank.n} did not answer" for rank in waiting)


def _end(started: list[_Rank]) -> None:
    """Kill the processes, each by its number."""
    # A rank that has sent its result only has to exit.
    until = time.monotonic() + GRACE_S
    for rank in started:
        rank.process.join(max(until - time.monotonic(), 0))
    for rank in started:
        rank.process.kill()
    for rank in started:
        rank.process.join()
        rank.process.close()
        rank.link.close()


def _run(
    rank: int, n: int, folder: str, limit_s: float, link: Connection, function: Callable[..., Any], args: Any
) -> None:
    """Run the function in a rank, and send its result or error."""
    with _printing_to(Path(folder, f"{rank}.txt")) as log:
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        # The process that started this rank may be gone by then.
        faulthandler.dump_traceback_later(START_S + limit_s + 2 * DUMP_S, exit=True, file=log)
        # Memory of the fork server is shared with the rank, unless the garbage collector writes to it.
        gc.freeze()
        try:
            with _joined(rank, n, folder, limit_s):
                link.send_bytes(BEGUN)
                link.recv_bytes()
                found = _call(function, rank, n, *args)
            if found[0] == "returned":
                _check_no_thread_is_left()
        except BaseException as error:
            found = _describe(error)
        link.send_bytes(pickle.dumps(found))


def _call(function: Callable[..., Any], *args: Any) -> tuple[str, float, bytes, str]:
    """Call the function and return its result or error, with the time."""
    try:
        return "returned", time.monotonic(), pickle.dumps(function(*args)), ""
    except BaseException as error:
        # Before leaving the process group, because leaving makes waiting ranks raise errors of their own.
        return _describe(error)


def _describe(error: BaseException) -> tuple[str, float, bytes, str]:
    """Return an exception with the time, as bytes if it can be pickled, and as text."""
    text = "".join(traceback.format_exception(error))
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:
        packed = b""
    return "raised", time.monotonic(), packed, text


@contextlib.contextmanager
def _printing_to(path: Path) -> Iterator[Any]:
    """Redirect the process's output to a file, and yield the file."""
    with path.open("w", buffering=1) as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        # The streams of a forked process may be closed.
        sys.stdout = sys.stderr = log
        yield log


@contextlib.contextmanager
def _joined(rank: int, n: int, folder: str, limit_s: float) -> Iterator[None]:
    """Join the process group, like a launcher's script, and leave it at the end."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
    os.environ.update({name: str(number) for name, number in names.items()})
    # In some containers the name of the machine cannot be resolved.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # As in tests/conftest.py, which does not run in this process.
    grad_split.LEAST_PRODUCTS = defaultdict(int)
    gradient_sums.LEAST_BYTES = 200
    state_times()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    # On a busy machine ranks take a while to meet, which does not count for the function.
    limit = timedelta(seconds=max(limit_s, START_S))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n, timeout=limit)
    try:
        yield
    finally:
        # A failure may have ended the process group.
        if dist.is_initialized():
            dist.destroy_process_group()


def _check_no_thread_is_left() -> None:
    """Raise AssertionError if a pipeline's threads outlive it, as tests/conftest.py does."""
    if _list_threads():  # a collection takes longer than most ranks
        gc.collect()
    # A thread ends by itself once its pipeline is gone, which takes a while on a busy machine.
    for thread in _list_threads():
        thread.join(DUMP_S)
    left = [thread.name for thread in _list_threads()]
    assert not left, f"threads outlive the function: {left}"


def _list_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fxsplit-")]
