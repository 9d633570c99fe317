"""Timelines of simulations: which actions are drawn, under which names."""

from __future__ import annotations

from fxsplit.schedule import Action, Times, generate, simulate
from fxsplit.schedule.flow import with_transfers
from fxsplit.schedule.simulation.timeline import Span, Timeline


def test_what_takes_no_time_is_left_out_unless_it_computes() -> None:
    simulation = simulate(with_transfers(generate("GPipe", 2, 1)), Times([0, 1], [2, 2]))
    timeline = Timeline.of(simulation)
    assert timeline.spans[0] == (Span(Action(0, "F", 0), 0, 0), Span(Action(0, "B", 0), 3, 5))
    assert [str(span.action) for span in timeline.spans[1]] == ["1F0", "1B0"]
    steps = Timeline.of(simulate(generate("PipeDream", 1, 1), Times([1], [2], step_ms=[3])))
    assert [str(span.action) for span in steps.spans[0]] == ["0F0", "0B0", "0STEP0v1"]


def test_names_and_length() -> None:
    simulation = simulate(generate("GPipe", 2, 1), Times([1, 1], [2, 2]))
    timeline = Timeline.of(simulation, memory=(((0.0, 7.0),),))
    assert timeline.title == "GPipe" and timeline.devices == ("device 0", "device 1") and timeline.length_ms == 6
    assert timeline.memory == (((0.0, 7.0),),)
    assert Timeline.of(simulation, ("a", "b")).devices == ("a", "b")
    assert Timeline("nothing", ("a",), ((),)).length_ms == 0
