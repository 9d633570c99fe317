"""Tried releases of companion libraries are stated once, and an untried release gives a warning."""

from __future__ import annotations

import sys
import tomllib
import warnings
from importlib import metadata
from types import ModuleType

import pytest

import fxsplit
from fxsplit.api import companions
from fxsplit.api.companions import TRIED, read_release, warn_of_untried
from fxsplit.errors import FxsplitWarning
from tests.docs.markdown import ROOT
from tests.support.models import FAST, Mlp

COMPANIONS = {name: ends for name, ends in TRIED.items() if name != "torch"}
"""tests/house/test_package.py compares the releases of torch."""


@pytest.fixture(autouse=True)
def never_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companions, "_warned", set())


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    """Let a library look as if it were loaded in some version."""
    if name != "torch":
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[name], "__version__", version, raising=False)


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


def read_pins(name: str) -> dict[str, str]:
    """Return the version of each package that a file of constraints states."""
    return dict(line.split("==") for line in (ROOT / name).read_text().splitlines() if "==" in line)


def test_the_ranges_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    stated = {f"{name}>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}" for name, (first, last) in COMPANIONS.items()}
    assert set(extras["companions"]) == stated


@pytest.mark.parametrize(("file", "end"), [("constraints.txt", 0), ("constraints-newest.txt", 1)])
def test_both_ends_of_the_ranges_are_installed_for_tests(file: str, end: int) -> None:
    pins = read_pins(file)
    found = {name: read_release(pins[name]) for name in COMPANIONS}
    assert found == {name: ends[end] for name, ends in COMPANIONS.items()}
    assert pins["torch"].count(".") == 2, "torch has one release: an unpinned one pulls gigabytes"


def test_the_docs_state_the_ranges() -> None:
    text = (ROOT / "docs" / "devices.md").read_text()
    for name, ends in COMPANIONS.items():
        first, last = (".".join(map(str, end)) for end in ends)
        assert f"| {name} | {first} to {last} |" in text


@pytest.mark.long
@pytest.mark.companions
@pytest.mark.parametrize("name", COMPANIONS)
def test_what_is_installed_is_an_end_of_the_range(name: str) -> None:
    """The long tests run with the first releases, and once more with the last releases."""
    assert read_release(metadata.version(name)) in TRIED[name]
