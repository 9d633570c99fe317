"""Run the project's tests on the GPU: those that need one, and the tests of CPU devices with the GPU in their place.

Files of tests are dealt to several processes. They need pytest and no plugin. If a test hangs, the rest of its file is
left out, and its process goes on with the next file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from bench.gpu.not_on_gpu import FOLDERS
from bench.gpu.parts import ROOT, make_environment
from bench.gpu.setting import Setting

PROCESSES = 8
"""Each process takes about half a GiB of the GPU for itself, and a core."""
FEWEST_S = 8.0
"""With less time left, no process is started any more: it takes as long to load torch."""
DRY = ("tests/runtime/job/test_channels.py", "tests/runtime/job/test_forwards.py")
SHOWN = 60
"""How many failing tests are named."""
STACKS = 1500
"""How many characters of a hanging process's stacks are kept."""

Line = dict[str, str]
"""A line of the tally: a test, its outcome, and why."""


def run_gpu_tests(setting: Setting) -> int:
    """Run the tests with the marker gpu; return how many fail."""
    files = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in read(p)]
    return run_files(setting, "tests that need a GPU", files, ["-m", "gpu"], {})


def run_suite(setting: Setting) -> int:
    """Run the tests of CPU devices on the GPU; return how many fail."""
    files = list(DRY) if setting.dry else list_files()
    words = ["-p", "bench.gpu.plugin", "-m", "not long and not gpu"]
    return run_files(setting, "tests of CPU devices", files, words, {"FXSPLIT_ON": setting.name})


def list_files() -> list[str]:
    """Return the files of tests that run on the GPU, the largest first, because a large file should not start last."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("test_*.py")]
    return [str(p.relative_to(ROOT)) for p in sorted(found, key=lambda p: (-p.stat().st_size, str(p)))]


def run_files(
    setting: Setting, what: str, files: Sequence[str], words: Sequence[str], environment: Mapping[str, str]
) -> int:
    """Run files of tests; note how many tests passed, failed and so on, and each failure; return how many failed."""
    count = min(PROCESSES, os.cpu_count() or 1, len(files))
    hands = [list(files[i::count]) for i in range(count)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as pool:
        tallies = [Path(folder) / f"{i}.jsonl" for i in range(count)]
        run = partial(run_hand, setting, words, environment)
        told = [line for lines in pool.map(run, hands, tallies) for line in lines]
    # Each process that was given a file that cannot be imported reports it again.
    told = list({tuple(line.items()): line for line in told}.values())
    outcomes = Counter(line["outcome"] for line in told if line["outcome"] not in ("started", "ended"))
    failed = [line for line in told if line["outcome"] in ("failed", "not over")]
    for line in failed[:SHOWN]:
        setting.note(f"{what} that fail", test=line["test"], why=line["why"])
    setting.note(what, files=len(files), **dict(sorted(outcomes.items())))
    return len(failed)


def run_hand(
    setting: Setting, words: Sequence[str], environment: Mapping[str, str], files: Sequence[str], tally: Path
) -> list[Line]:
    """Run files in one process, restarted after a crash or a hang with the files that are left; return the tally."""
    told: list[Line] = []
    left = list(files)
    while left:
        if setting.findings.seconds_left() < FEWEST_S:
            return [*told, *({"test": f, "outcome": "not over", "why": "no time was left to start it"} for f in left)]
        end = run_pytest(setting, [*words, *left], environment, tally)
        lines: list[Line] = [json.loads(line) for line in read(tally).splitlines()] if tally.exists() else []
        tally.unlink(missing_ok=True)
        told += lines
        if lines and lines[-1]["outcome"] == "ended":
            return told
        # The process ended in the last test that has started; if none has, the first file is at fault.
        last = next((line["test"] for line in reversed(lines) if line["outcome"] == "started"), left[0])
        told.append({"test": last, "outcome": "not over", "why": end})
        file = last.split("::")[0]
        left = left[left.index(file) + 1 :] if file in left else left[1:]
    return told


def run_pytest(setting: Setting, words: Sequence[str], environment: Mapping[str, str], tally: Path) -> str:
    """Run pytest; return how it ended, with the end of its output."""
    # A file that cannot be imported is one failure; the rest of the files still run.
    options = ["-q", "--continue-on-collection-errors", "-p", "bench.gpu.tally", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *words]
    given = make_environment() | dict(environment)
    # numba numbers the files of its cache without a lock: processes that compile one kernel at once mix them up.
    own = {"NUMBA_CACHE_DIR": f"{given['NUMBA_CACHE_DIR']}-{tally.stem}"}
    own |= {"FXSPLIT_TALLY": str(tally), "OMP_NUM_THREADS": "1"}
    left_s = setting.findings.seconds_left()
    printed = tally.with_suffix(".txt")
    with printed.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=given | own)
        try:
            # There is no limit if a person runs only this part.
            code = process.wait(None if left_s == float("inf") else left_s)
        except subprocess.TimeoutExpired:
            return "the part's time was over"
        finally:
            process.kill()
            process.wait()
    text = read(printed)
    # faulthandler's text begins with this word, and it prints the innermost call of each thread first.
    stacks = text.find("Timeout (")
    return f"pytest ended with exit code {code}: {text[stacks:][:STACKS] if stacks >= 0 else text[-STACKS:]}"


def read(path: Path) -> str:
    """Return a file's text."""
    return path.read_text(encoding="utf-8", errors="replace")
