"""Pictures: their contents, and refused files."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fxsplit.errors import InputError
from fxsplit.report.picture import save_picture
from fxsplit.schedule import Action
from fxsplit.schedule.simulation.timeline import Span, Timeline
from tests.report.timelines import TIMELINE


def test_names_title_numbers_and_legend_are_drawn(tmp_path: Path) -> None:
    save_picture([TIMELINE, Timeline("empty", (), ())], tmp_path / "timeline.svg")
    drawn = (tmp_path / "timeline.svg").read_text()
    for text in ("GPipe: 8 ms", "empty: 0 ms", "long name", "forward", "weight gradient", "reduce"):
        assert f"<!-- {text} -->" in drawn
    assert "<!-- input gradient -->" not in drawn, "the legend has what occurs"
    assert "#4c78a8" in drawn and "#b279a2" in drawn


def test_links_are_lanes_behind_the_devices(tmp_path: Path) -> None:
    links = (("a > long name", (Span(Action(0, "SEND_F", 7), 2.0, 4.0),)),)
    save_picture([replace(TIMELINE, links=links)], tmp_path / "timeline.svg")
    drawn = (tmp_path / "timeline.svg").read_text()
    assert "<!-- a &gt; long name -->" in drawn and "<!-- value sent -->" in drawn


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"end its name in \.svg, \.png, \.pdf"):
        save_picture([TIMELINE], tmp_path / "timeline.bmp")


def test_matplotlib_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install 'fxsplit\[picture\]'"):
        save_picture([TIMELINE], tmp_path / "timeline.svg")
