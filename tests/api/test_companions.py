"""Releases of libraries that work with pipelines: stated once, and an untried one is named."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from types import ModuleType

import pytest

import fxsplit
from fxsplit.api import companions
from fxsplit.api.companions import TRIED, read_release, warn_of_untried
from fxsplit.errors import FxsplitWarning
from tests.docs.markdown import ROOT
from tests.support.models import FAST, Mlp

GENERATE = """
import torch
import fxsplit
from tests.support.text_models import make_prompt, make_text_model

for name in ("gpt2", "llama"):
    model = make_text_model(name)
    prompt = make_prompt(model, 4)
    with fxsplit.compile(model, ["cpu"] * 2, inference=True, n_microbatches=2) as pipe:
        options = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(pipe.generate(**prompt, **options), model.generate(**prompt, **options))
import transformers
print(transformers.__version__)
"""


@pytest.fixture(autouse=True)
def never_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companions, "_warned", set())


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    """Let a library look as if it were loaded in some version."""
    library = ModuleType(name)
    library.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, library)


@pytest.mark.parametrize("name", TRIED)
@pytest.mark.parametrize("beyond", [-1, 1], ids=["older", "newer"])
def test_an_untried_release_is_named_once(name: str, beyond: int, monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor = TRIED[name][beyond > 0]
    pretend(monkeypatch, name, f"{major}.{minor + beyond}.0")
    with pytest.warns(FxsplitWarning, match=f"^{name} {major}.{minor + beyond}.0 was not tried.*fxsplit.verify"):
        fxsplit.compile(Mlp(), 2, passes=FAST).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxsplitWarning)
        warn_of_untried()


@pytest.mark.parametrize("name", TRIED)
def test_a_tried_release_is_not_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for release in TRIED[name]:
        pretend(monkeypatch, name, ".".join(map(str, release)) + ".3.dev0")
        with warnings.catch_warnings():
            warnings.simplefilter("error", FxsplitWarning)
            warn_of_untried()


def test_the_ranges_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    stated = {f"{name}>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}" for name, (first, last) in TRIED.items()}
    assert set(extras["companions"]) == stated
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name, (first, last) in TRIED.items():
        assert name not in pinned or first <= read_release(pinned[name]) <= last


@pytest.mark.long
def test_generate_works_with_the_newest_transformers_tried(tmp_path: Path) -> None:
    """The oldest is the one that all other tests use."""
    pytest.importorskip("transformers")
    major, minor = TRIED["transformers"][1]
    folder = str(tmp_path / "newest")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
    got = subprocess.run([*pip, f"transformers=={major}.{minor}.*"], capture_output=True, text=True, check=False)
    if got.returncode:
        pytest.skip(f"pip has no transformers {major}.{minor}: {got.stderr.strip().splitlines()[-1:]}")
    paths = os.pathsep.join((folder, str(ROOT), os.environ.get("PYTHONPATH", "")))
    here = os.environ | {"PYTHONPATH": paths}
    ran = subprocess.run(
        [sys.executable, "-c", GENERATE], env=here, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert read_release(ran.stdout.strip().splitlines()[-1]) == (major, minor)
