"""Bars and phases are shown for long work, by name, only on terminals."""

from __future__ import annotations

import io
import sys
import threading
from contextlib import redirect_stderr
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

import fxsplit
from fxsplit.system.progress import listen, phase, track
from fxsplit.system.progress_bar import is_notebook, show_progress
from tests.support.terminals import Terminal

PASSES = "pass profile", "pass augment", "pass order", "pass partition"


@pytest.fixture(autouse=True)
def like_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize(("patience_s", "shown"), [(0.0, True), (60.0, False)])
def test_a_bar_is_shown_for_long_work_on_terminals(
    patience_s: float, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxsplit.system.progress_bar.PATIENCE_S", patience_s)
    for file, expected in ((Terminal(), shown), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", file)
        with show_progress():
            assert list(track("abc", "profiling")) == ["a", "b", "c"]
        assert ("profiling" in file.getvalue()) == expected


def test_a_phase_is_shown_while_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxsplit.system.progress_bar.PATIENCE_S", 0.01)
    file = Terminal("exporting")
    monkeypatch.setattr(sys, "stderr", file)
    with show_progress():
        # The phase redirects another stream.
        with phase("exporting"), redirect_stderr(io.StringIO()) as other:
            assert file.shown.wait(60), "nothing tells of a phase until it ends"
        with pytest.raises(ValueError, match="inside"), phase("failing"):
            raise ValueError("inside")
    assert sys.stderr is file and other.getvalue() == ""


def test_a_short_phase_shows_nothing_and_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Terminal()
    monkeypatch.setattr(sys, "stderr", file)
    with show_progress(), phase("profiling"), phase("inner"):
        pass
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    for timer in timers:
        timer.join(60)
    assert file.getvalue() == "" and not any(timer.is_alive() for timer in timers)


def test_the_phases_of_a_compile_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("fxsplit.system.progress_bar._Bars.hear", lambda bars, what, done, total: told.append(what))
    monkeypatch.setattr(sys, "stderr", Terminal())
    fxsplit.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), 2, example_inputs=torch.randn(4, 4)).close()
    names = list(dict.fromkeys(told))
    assert "capturing Sequential (symbolic_trace)" in names and "comparing the graph with Sequential" in names
    assert [n for n in names if n.startswith("pass ")][:4] == [
        f"pass {p}" for p in ("profile", "augment", "order", "partition")
    ]


class Kernel:
    """The shell object of IPython in a notebook."""

    kernel = object()


def in_a_notebook(monkeypatch: pytest.MonkeyPatch, *, widgets: bool) -> None:
    """Make this process look like the kernel of a notebook, with ipywidgets or without."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=Kernel))
    found = {"ipywidgets": object() if widgets else None}
    monkeypatch.setattr("fxsplit.system.progress_bar.find_spec", found.__getitem__)


def test_a_notebook_without_widgets_has_a_line_for_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxsplit.system.progress_bar.PATIENCE_S", 0.0)
    file = Terminal("planning")
    monkeypatch.setattr(sys, "stderr", file)
    in_a_notebook(monkeypatch, widgets=False)
    with show_progress():
        for _ in range(2):
            with phase("planning"):
                assert file.shown.wait(60)
        assert list(track("abc", "profiling")) == ["a", "b", "c"]
    assert file.getvalue() == "planning ...\nprofiling: 3 in all ...\n"


def test_a_notebook_with_widgets_has_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    consoles: list[bool] = []

    def make_console(*, force_jupyter: bool) -> Console:
        consoles.append(force_jupyter)
        return Console()

    in_a_notebook(monkeypatch, widgets=True)
    monkeypatch.setattr("rich.console.Console", make_console)
    with show_progress():
        pass
    assert consoles == [True]


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    assert not is_notebook()


def test_a_block_inside_of_another_shares_its_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(sys, "stderr", Terminal())
    with listen(lambda what, done, total: heard.append(what)), show_progress():
        assert list(track("a", "profiling")) == ["a"]
    assert heard == ["profiling"]


def test_planning_tells_what_takes_long() -> None:
    costs = fxsplit.profile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(4, 4), n_microbatches=2)
    told: list[str] = []
    with listen(lambda what, done, total: told.append(what)):
        fxsplit.plan(costs, 2)
    assert f"enumerating states of {len(costs.nodes)} nodes" in told and "planning for 2 devices" in told


def test_nothing_is_shown_where_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    fxsplit.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), 2, example_inputs=torch.randn(4, 4)).close()
    assert capfd.readouterr() == ("", "")
