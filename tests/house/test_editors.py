"""Type checkers, and so editors, find fxsplit from outside of the checkout, as `make test` installs it.

The editable install used to be a finder hook, which type checkers do not run: they reported import-not-found, and every
type was Any.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """\
from typing import Any

import fxsplit


def train(model: Any) -> float:
    pipe = fxsplit.compile(model, 2)
    reveal_type(pipe)
    fxsplit.compile(model, 2, n_microbatchs=4)
    fxsplit.compile(model, 2, schedule="1f1b")
    fxsplit.compile(model, 2, recompute="allways")
    fxsplit.compile(model, 2, compress="int4", schedule="auto")
    return pipe.plan.bottleneck_ms + reveal_type(fxsplit.plan("net.json", 8).gap)
"""


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command without the variables that would lead it to the checkout by another way."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a user's script, and a virtual environment with an editable install of the checkout."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    build = f"from setuptools import build_meta; build_meta.build_editable({str(folder)!r})"
    made = run(sys.executable, "-c", build, cwd=ROOT)
    assert made.returncode == 0, made.stdout + made.stderr
    assert run(sys.executable, "-m", "venv", "--without-pip", "environment", cwd=folder).returncode == 0
    (site,) = (folder / "environment").glob("lib/python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return folder


def test_the_editable_install_is_one_line_that_names_the_checkout(outside: Path) -> None:
    (pth,) = outside.glob("environment/lib/python*/site-packages/*.pth")
    assert pth.read_text(encoding="utf-8").split() == [str(ROOT)]
    assert not list(outside.glob("environment/lib/python*/site-packages/*.py"))


def test_mypy_finds_types_and_a_misspelt_keyword(outside: Path) -> None:
    python = str(outside / "environment" / "bin" / "python")
    found = run(sys.executable, "-m", "mypy", "--python-executable", python, "train.py", cwd=outside).stdout
    assert 'Revealed type is "fxsplit.api.pipeline.pipeline.Pipeline"' in found, found
    assert 'Revealed type is "float"' in found, found
    assert 'Unexpected keyword argument "n_microbatchs" for "compile"' in found, found
    for name in ("1f1b", "allways", "int4"):
        assert f"has incompatible type \"Literal['{name}']\"" in found, found
    assert "Found 4 errors" in found, found


@pytest.mark.long
def test_basedpyright_finds_types_and_a_misspelt_keyword(outside: Path) -> None:
    pytest.importorskip("basedpyright", reason="basedpyright is not installed: make test-long installs it")
    python = str(outside / "environment" / "bin" / "python")
    found = run(sys.executable, "-m", "basedpyright", "--pythonpath", python, "train.py", cwd=outside).stdout
    assert 'Type of "pipe" is "Pipeline"' in found, found
    assert 'is "float"' in found, found
    assert 'No parameter named "n_microbatchs"' in found, found
    assert all(f"Literal['{name}']" in found for name in ("1f1b", "allways", "int4")), found
    assert "4 errors," in found, found
