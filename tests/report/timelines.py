"""A timeline for tests of reports: two devices, the second with two stages, and memory of the first."""

from __future__ import annotations

from fxsplit.schedule import Action
from fxsplit.schedule.simulation.timeline import Span, Timeline

TIMELINE = Timeline(
    "GPipe",
    ("a", "long name"),
    (
        (Span(Action(0, "F", 7), 0.0, 2.0), Span(Action(0, "REDUCE"), 6.0, 8.0)),
        (Span(Action(1, "B", 3), 2.0, 4.0), Span(Action(2, "W", 1), 4.0, 4.5)),
    ),
    (((0.0, 5.0), (2.0, 9.0)),),
)
