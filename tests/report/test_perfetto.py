"""Trace events: every span, name and counter, in microseconds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from fxsplit.report.perfetto import save_trace, trace_events
from fxsplit.schedule import Action, Times, generate, simulate
from fxsplit.schedule.simulation.timeline import Span, Timeline
from tests.report.timelines import TIMELINE


def test_events_of_two_timelines() -> None:
    told = trace_events([TIMELINE, TIMELINE])
    assert told["displayTimeUnit"] == "ms"
    events = [event for event in told["traceEvents"] if event["pid"] == 1]
    assert len(events) * 2 == len(told["traceEvents"])
    names = [(e["name"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [("process_name", 0, "GPipe"), ("thread_name", 0, "a"), ("thread_name", 1, "long name")]
    spans = [(e["name"], e["cat"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        ("0F7", "forward", 0, 0.0, 2000.0),
        ("0REDUCE", "reduce", 0, 6000.0, 2000.0),
        ("1B3", "backward", 1, 2000.0, 2000.0),
        ("2W1", "weight gradient", 1, 4000.0, 500.0),
    ]
    assert [(e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "C"] == [
        ("memory of a", 0.0, {"bytes": 5.0}),
        ("memory of a", 2000.0, {"bytes": 9.0}),
        ("microbatches held on a", 2000.0, {"microbatches": 1}),
        ("microbatches held on long name", 4000.0, {"microbatches": -1}),
        ("microbatches held on long name", 4500.0, {"microbatches": -2}),
    ]
    (first,) = [e for e in events if e["name"] == "0F7"]
    assert first["args"] == {"stage": 0, "op": "F", "microbatch": 7, "replica": 0, "version": 0}


def test_links_are_rows_behind_the_devices() -> None:
    timeline = replace(TIMELINE, links=(("a > b", (Span(Action(0, "SEND_F", 7), 2.0, 5.0),)),))
    events = trace_events([timeline])["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["a", "long name", "a > b"]
    (sent,) = [e for e in events if e["name"] == "0SEND_F7"]
    assert (sent["cat"], sent["tid"], sent["ts"], sent["dur"]) == ("value sent", 2, 2000.0, 3000.0)


def test_a_file_holds_the_same(tmp_path: Path) -> None:
    save_trace([TIMELINE], tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace_events([TIMELINE])


def test_rows_say_what_part_of_the_model_a_device_has() -> None:
    timeline = replace(TIMELINE, places=("embed .. layers.0", "head"))
    named = [e["args"]["name"] for e in trace_events([timeline])["traceEvents"] if e["name"] == "thread_name"]
    assert named == ["a: embed .. layers.0", "long name: head"]
    assert timeline.labels == ["a\nembed .. layers.0", "long name\nhead"] and TIMELINE.labels == ["a", "long name"]
    lines = str(timeline).splitlines()
    assert lines[0].split() == ["device", "actions", "computes", "ms", "idle", "memory", "has"]
    assert lines[1].endswith("embed .. layers.0") and lines[2].split()[-2:] == ["-", "head"]


def test_counters_and_arrows_of_a_step() -> None:
    """Each message has one arrow, from the action that makes it to its reader, over its link if it takes time."""
    simulation = simulate(generate("1F1B", 3, 4), Times([1.0] * 3, [2.0] * 3, [0.0, 0.5, 0.0], [0.0, 0.5, 0.0]))
    events = trace_events([Timeline.of(simulation)])["traceEvents"]
    begun, ended, passed = ([e for e in events if e["ph"] == kind] for kind in "sft")
    assert len(begun) == len(ended) == 2 * 2 * 4 and len(passed) == 2 * 4
    assert {e["id"] for e in begun} == {e["id"] for e in ended} >= {e["id"] for e in passed}
    spans = [e for e in events if e["ph"] == "X"]
    for arrow in (*begun, *ended, *passed):
        inside = [s for s in spans if s["tid"] == arrow["tid"] and s["ts"] <= arrow["ts"] <= s["ts"] + s["dur"]]
        assert inside, "an arrow begins and ends at a span"
    for one, other in zip(begun, sorted(ended, key=lambda e: [b["id"] for b in begun].index(e["id"])), strict=True):
        assert one["ts"] <= other["ts"] and one["tid"] != other["tid"] and one["name"] == other["name"]
    held = {e["name"]: [] for e in events if e["ph"] == "C"}  # type: dict[str, list[int]]
    for event in events:
        if event["ph"] == "C":
            held[event["name"]].append(event["args"]["microbatches"])
    assert [max(values) for values in held.values()] == [3, 2, 1], "1F1B holds as many as there are stages left"
    assert [values[-1] for values in held.values()] == [0, 0, 0]


def test_inference_holds_nothing() -> None:
    events = trace_events([Timeline.of(simulate(generate("GPipe", 2, 2).only("F"), Times.unit(2)))])["traceEvents"]
    assert not any(e["ph"] == "C" for e in events) and sum(e["ph"] == "s" for e in events) == 2
