"""Kernels are compiled by one process at a time, and come back from numba's cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from fxsplit.system import kernels

PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import numpy as np
import own_kernels
from own_kernels import add
from fxsplit.system.kernels import compile_kernel
made = compile_kernel(add)
made_up = np.arange(3, dtype={dtype!r})
print(made(getattr(own_kernels, "make", lambda x: x)(made_up)), sum(made.stats.cache_misses.values()), flush=True)
"""


SUM = "def add(x):\n    return x.sum() + x.size\n"
OF_CLASS = """from typing import NamedTuple
class {name}(NamedTuple):
    x: object
def make(x):
    return {name}(x)
def add(held):
    return held.x.sum() + held.x.size
"""


def start(folder: Path, dtype: str, source: str = SUM) -> subprocess.Popen[str]:
    (folder / "own_kernels.py").write_text(source)
    program = PROGRAM.format(folder=str(folder), dtype=dtype)
    known = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache")}
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=known)


def test_processes_that_start_together_compile_each_signature_once(tmp_path: Path) -> None:
    dtypes = ["int64", "float64", "int64", "float64"]
    said = [p.communicate()[0].split() for p in [start(tmp_path, dtype) for dtype in dtypes]]
    assert [float(result) for result, _ in said] == [6.0] * 4
    misses = [int(count) for _, count in said]
    assert misses[0] + misses[2] == 1 and misses[1] + misses[3] == 1
    # Both are in the cache.
    assert [start(tmp_path, dtype).communicate()[0].split()[1] for dtype in dtypes[:2]] == ["0", "0"]


@pytest.mark.parametrize("spoil", ["renamed", "cut off"])
def test_a_cache_that_cannot_be_read_is_emptied(tmp_path: Path, spoil: str) -> None:
    """An update of the package may rename the class of an argument, which the files of the cache name."""

    def run(name: str) -> str:
        process = start(tmp_path, "int64", OF_CLASS.format(name=name))
        return process.communicate()[0]

    assert run("First") == "6 1\n" and run("First") == "6 0\n"
    if spoil == "cut off":
        (index,) = (tmp_path / "cache").rglob("*.nbi")
        index.write_bytes(index.read_bytes()[:40])
    name = "Second" if spoil == "renamed" else "First"
    assert run(name) == "6 1\n" and run(name) == "6 0\n"


def test_a_process_that_never_releases_the_lock_holds_up_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x):  # type: ignore[no-untyped-def]
        return x * 2

    monkeypatch.setattr(kernels, "PATIENCE_S", 0.05)
    made = kernels.compile_kernel(double)
    folder = Path(made.stats.cache_path)  # type: ignore[attr-defined]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{__name__}.double.lock"):
        assert made(np.arange(3)).tolist() == [0, 2, 4]
