"""Run a program in a process of its own, in which torch and fxsplit are loaded already.

    done = run('import sys, fxsplit; print(fxsplit.DEFAULT); sys.exit(3)')
    assert done.code == 3 and "partition" in done.out

The process begins in a tenth of a second: the fork server of tests/support/ranks.py begins it, and a new Python would
load torch for seconds. The program is `__main__`, its errors go to `sys.excepthook`, and it ends like any Python: after
its threads, with functions of `atexit`, finalisers and an exit code. A test starts Python itself if it is about what is
imported, about variables that Python or torch read when they start, or about a launcher.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.ranks import PRELOADED

LIMIT_S = 300.0
"""How long a program may take, on a busy machine."""
NOTHING: Mapping[str, str] = {}


class Done(NamedTuple):
    """What is left of a program: its exit code (minus the number of the signal that ended it), and what it wrote."""

    code: int
    out: str
    error: str


class Program:
    """A program that runs. At the end of a block with it, it is killed if it still runs."""

    def __init__(
        self,
        code: str,
        *arguments: str,
        cwd: Path | None = None,
        name: str = "-c",
        env: Mapping[str, str] = NOTHING,
    ) -> None:
        """Start `code` with `arguments` in its sys.argv.

        name: the program's file in tracebacks; a file of this name in the folder `cwd` shows its lines there.
        env: variables that the program sees beside those of this process.
        """
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._error = tempfile.NamedTemporaryFile("r", prefix="program-", errors="replace")  # noqa: SIM115
        here, there = context.Pipe(duplex=False)
        place = (str(cwd or os.getcwd()), {**os.environ, **env}, there, self._error.name)
        self._process = context.Process(target=_live, args=(code, name, arguments, *place))
        self._process.start()
        there.close()
        self._out = os.fdopen(os.dup(here.fileno()), errors="replace")
        here.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._out.close()
        self._error.close()

    def read_line(self) -> str:
        """Return the next line that the program prints, without its end; "" if the program is over."""
        return self._out.readline().rstrip("\n")

    def send_signal(self, number: int) -> None:
        """Send a signal to the program."""
        os.kill(self._process.pid, number)

    def finish(self, limit_s: float = LIMIT_S) -> Done:
        """Wait until the program is over; raises subprocess.TimeoutExpired after `limit_s` seconds.

        What the program prints until then must fit in a pipe: 64 KiB.
        """
        self._process.join(limit_s)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired(self._process.name, limit_s)
        return Done(self._process.exitcode, self._out.read(), self._error.read())


def run(code: str, *arguments: str, **options: Any) -> Done:
    """Run a program to its end. `options` are those of Program."""
    with Program(code, *arguments, **options) as program:
        return program.finish()


def _live(
    code: str, name: str, arguments: tuple[str, ...], folder: str, known: dict[str, str], out: Connection, error: str
) -> None:
    """Become the program."""
    os.environ.clear()
    os.environ.update(known)
    os.chdir(folder)
    os.dup2(out.fileno(), 1)
    out.close()
    os.dup2(os.open(error, os.O_WRONLY | os.O_APPEND), 2)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.argv = [name, *arguments]
    sys.path.insert(0, "")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The process was begun by multiprocessing, but the program was not.
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    # Memory of the fork server is shared with the program, unless the garbage collector writes to it.
    gc.freeze()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    ctypes.pythonapi.Py_Exit(_run_main(code, name, main.__dict__))


def _run_main(code: str, name: str, names: dict[str, Any]) -> int:
    """Run the program, show the error that ends it, and return its exit code."""
    try:
        exec(compile(code, name, "exec"), names)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        # The first frame is this function's.
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0
