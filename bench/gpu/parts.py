"""Run the parts of the three commands, each in a process of its own, with its own time limit.

A part that hangs or crashes costs only its own time, and its findings up to then are kept.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.device import describe_device
from bench.gpu.findings import write_whole
from bench.gpu.tables import format_report

ROOT = Path(__file__).parents[2]
TAIL = 12
"""How many lines of a part's output are kept in the report if the part does not end well."""
LAST_WORDS_S = 4.0
"""Seconds before its limit at which a part prints where each of its threads is, and ends itself."""


@dataclass(frozen=True)
class Part:
    """One part of a command: the words after `python -m bench.gpu`, and its limit in seconds."""

    words: tuple[str, ...]
    limit_s: float

    @property
    def name(self) -> str:
        """The name of the part's files."""
        return "-".join(self.words).replace(" ", "-")


# Correctness comes first: if a step hangs or its values are wrong, no figure of speed means anything.
COMMANDS: dict[str, tuple[Part, ...]] = {
    "correct": (
        Part(("hang",), 40.0),
        Part(("tests",), 60.0),
        Part(("example",), 30.0),
        Part(("checks",), 110.0),
        Part(("chaos",), 80.0),
        Part(("suite",), 160.0),
    ),
    "speed": (
        Part(("bench", "large bf16"), 160.0),
        Part(("bench", "middle bf16"), 100.0),
        Part(("bench", "small bf16"), 70.0),
        Part(("bench", "tiny fp32"), 70.0),
        Part(("host",), 40.0),
        Part(("graphs",), 40.0),
    ),
    "pipeline": (
        Part(("green", "large bf16"), 280.0),
        Part(("green", "middle bf16"), 200.0),
    ),
}
"""Each command takes at most eight minutes."""


def run_command(command: str, out: Path, *, dry: bool, parts: Sequence[Part] | None = None) -> int:
    """Run a command's parts one after another; return how many of them did not end well.

    `out` gets the command's results as JSON and as Markdown, after each part, and the output of each part.
    """
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"command": command, "dry": dry, "device": describe_device(dry), "parts": []}
    for part in COMMANDS[command] if parts is None else parts:
        print(f"=== {part.name} (at most {part.limit_s:.0f} s)", flush=True)
        report["parts"].append(run_part(part, out, dry=dry))
        print(f"--- {part.name}: {report['parts'][-1]['outcome']}", flush=True)
        write_whole(out / f"{command}.json", json.dumps(report, indent=1))
        write_whole(out / f"{command}.md", format_report(report))
    print(format_report(report), flush=True)
    return sum(part["outcome"] != "ok" for part in report["parts"])


def run_part(part: Part, out: Path, *, dry: bool) -> dict[str, Any]:
    """Run one part; return its name, outcome, seconds and rows, and the end of its output if it went wrong."""
    found, log = out / f"{part.name}.json", out / f"{part.name}.txt"
    found.unlink(missing_ok=True)
    limit_s = part.limit_s - LAST_WORDS_S
    # All processes have one monotonic clock, so the time that a part takes to load torch counts for that part.
    begin = time.monotonic()
    words = [*part.words, "--json", str(found), "--until", str(begin + limit_s), *(["--dry"] if dry else [])]
    with log.open("wb") as output:
        # A session of its own, so that processes started by the part can be ended with it.
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu", *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=make_environment(),
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_session(process)
    seconds = time.monotonic() - begin
    told = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {"failed": None, "rows": []}
    outcome = judge(told["failed"], code, seconds, limit_s)
    tail = [] if outcome == "ok" else log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
    return {"part": part.name, "outcome": outcome, "seconds": round(seconds, 1), "rows": told["rows"], "tail": tail}


def judge(failed: int | None, code: int | None, seconds: float, limit_s: float) -> str:
    """Return a part's outcome in words, from its number of failed checks, its exit code, its time and its limit."""
    if failed is not None:
        return "ok" if failed == 0 else f"{failed} failed"
    if code is None or seconds >= limit_s:
        return f"not over after {seconds:.0f} s"
    return f"ended with exit code {code} after {seconds:.0f} s"


def make_environment() -> dict[str, str]:
    """Return the environment of a part: this checkout's modules, and caches in a folder that any user may write."""
    caches = Path(tempfile.gettempdir()) / "fxsplit-bench-gpu"
    defaults = {"NUMBA_CACHE_DIR": str(caches / "numba"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    # OpenMP's threads spin while they wait, at the expense of the stages' threads.
    defaults |= {"OMP_NUM_THREADS": "1"}
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    return defaults | dict(os.environ) | own | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that has a session of its own, and all processes that it has started."""
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
