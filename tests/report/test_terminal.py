"""Drawings in the terminal: width, numbers, idle time, and brightness."""

from __future__ import annotations

from dataclasses import replace

from fxsplit.report.terminal import draw
from fxsplit.schedule import Action
from fxsplit.schedule.action import COMPUTES
from fxsplit.schedule.simulation.timeline import Span, Timeline
from fxsplit.system.shown import WIDTH
from tests.report.timelines import TIMELINE


def test_blocks_are_as_wide_as_they_take_long() -> None:
    """Eight milliseconds on 16 columns after ten of names: two columns each."""
    assert draw(TIMELINE, 26).plain.splitlines() == [
        "a          F7 ........----",
        "long name .... B3 W.......",
        "F forward  B backward",
        "W weight gradient  . idle",
    ]


def test_an_operation_without_a_microbatch_bears_its_name() -> None:
    assert " REDUCE " in draw(TIMELINE, 10 + 32).plain


def test_colours_say_what_and_dim_says_a_later_stage() -> None:
    drawing = draw(TIMELINE, 26)
    styles = {drawing.plain[span.start : span.end].strip(): str(span.style) for span in drawing.spans[:-4]}
    assert styles["F7"] == "white on blue" and styles["B3"] == "black on green"
    assert styles["W"] == "black on yellow dim" and styles["----"] == "white on magenta"
    assert styles["........"] == "dim"


def test_links_have_lines_behind_the_devices() -> None:
    timeline = replace(TIMELINE, links=(("a > long name", (Span(Action(0, "SEND_F", 7), 2.0, 4.0),)),))
    assert draw(timeline, 14 + 16).plain.splitlines()[2] == "a > long name .... f7 ........"


def test_a_legend_is_as_wide_as_the_drawing() -> None:
    """With values and gradients on links it was 85 columns wide."""
    spans = tuple(Span(Action(0, op, 7), n, n + 1.0) for n, op in enumerate((*COMPUTES, "SEND_F", "SEND_B")))
    lines = draw(Timeline("", ("a",), (spans,)), WIDTH).plain.splitlines()
    assert lines[1:] == [
        "F forward  B backward  I input gradient  W weight gradient  f value sent",
        "b gradient sent  . idle",
    ]
    assert draw(Timeline("", ("a",), (spans,)), 4).plain.splitlines()[1:3] == ["F forward", "B backward"]


def test_nothing_to_draw() -> None:
    assert draw(Timeline("", (), ()), 10).plain == ""
    assert draw(Timeline("", ("a",), ((),)), 4).plain == "a ..\n"
    assert draw(Timeline("", ("a",), ((),)), 0).plain == "a .\n", "one column at least"
