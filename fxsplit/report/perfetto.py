"""Timelines as trace events in JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing.

    {"traceEvents": [{"name": "0F0", "cat": "forward", "ph": "X", "ts": 0.0, "dur": 1000.0, "pid": 0, "tid": 0}, ...]}

`ts` and `dur` are in microseconds. `ph` is the kind of event: M names a row, X is a span, C sets a counter, and s, t
and f are the start, a point in between and the end of an arrow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from fxsplit.schedule.action import FORWARD, GRADIENTS, NAMES, RELEASES, SEND_B, SEND_F, SENDS
from fxsplit.schedule.simulation.timeline import Span, Timeline
from fxsplit.system.files import write_whole

US_PER_MS = 1000.0


def trace_events(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return timelines as one JSON object.

    Each timeline is a process, and each of its devices and links is a thread. Counters show the memory of a device in
    bytes, and how many microbatches it holds for their backwards. An arrow leads from an action to the action on
    another device that needs its result. If the link has a span for the message, the arrow passes it.
    """
    events: list[dict[str, Any]] = []
    for pid, timeline in enumerate(timelines):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": timeline.title}})
        for tid, (label, (_, spans)) in enumerate(zip(timeline.labels, timeline.rows, strict=True)):
            # Viewers group rows by process and thread: the timeline, and the device or link.
            here = {"pid": pid, "tid": tid}
            events.append({"name": "thread_name", "ph": "M", **here, "args": {"name": label.replace("\n", ": ")}})
            for action, begin_ms, end_ms in spans:
                events.append(
                    {
                        "name": str(action),
                        "cat": (NAMES | SENDS).get(action.op, action.op.lower()),
                        "ph": "X",
                        "ts": begin_ms * US_PER_MS,
                        "dur": (end_ms - begin_ms) * US_PER_MS,
                        **here,
                        "args": action._asdict(),
                    }
                )
        # A measured timeline has no memory, so the list may be shorter than the devices.
        for tid, (name, trace) in enumerate(zip(timeline.devices, timeline.memory, strict=False)):
            counter = {"name": f"memory of {name}", "ph": "C", "pid": pid, "tid": tid}
            events += [{**counter, "ts": ms * US_PER_MS, "args": {"bytes": bytes_}} for ms, bytes_ in trace]
        events += [*_count_held(pid, timeline), *_draw_arrows(pid, timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _count_held(pid: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield how many microbatches each device holds after each forward, and after each backward that releases one."""
    if not any(span.action.op in RELEASES for row in timeline.spans for span in row):
        return  # inference holds none
    for tid, (name, spans) in enumerate(zip(timeline.devices, timeline.spans, strict=True)):
        counter = {"name": f"microbatches held on {name}", "ph": "C", "pid": pid, "tid": tid}
        held = 0
        for action, _, end_ms in spans:
            change = (action.op == FORWARD) - (action.op in RELEASES)
            if change:
                held += change
                yield {**counter, "ts": end_ms * US_PER_MS, "args": {"microbatches": held}}


def _draw_arrows(pid: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield an arrow for each value and gradient that one device makes and another one needs."""
    place = {span.action[:3]: (tid, span) for tid, row in enumerate(timeline.spans) for span in row}
    links = {
        (span.action.stage, span.action.op, span.action.microbatch): (len(timeline.devices) + i, span)
        for i, (_, spans) in enumerate(timeline.links)
        for span in spans
    }
    for number, ((stage, op, microbatch), (tid, span)) in enumerate(sorted(place.items())):
        if op not in (FORWARD, *GRADIENTS):
            continue
        after = stage + 1 if op == FORWARD else stage - 1
        wanted = (FORWARD,) if op == FORWARD else GRADIENTS
        target = next((place[after, kind, microbatch] for kind in wanted if (after, kind, microbatch) in place), None)
        if target is None or target[0] == tid:
            continue
        link = links.get((stage, SEND_F if op == FORWARD else SEND_B, microbatch))
        arrow = {"name": "value" if op == FORWARD else "gradient", "cat": "message", "pid": pid}
        arrow["id"] = f"{pid}.{number}"
        # An arrow binds to the span that encloses its time: its own ends are inside of both spans.
        yield {**arrow, "ph": "s", "tid": tid, "ts": _inside(span)}
        if link is not None:
            yield {**arrow, "ph": "t", "tid": link[0], "ts": _inside(link[1])}
        yield {**arrow, "ph": "f", "bp": "e", "tid": target[0], "ts": target[1].begin_ms * US_PER_MS}


def _inside(span: Span) -> float:
    """Return the middle of a span, in microseconds."""
    return (span.begin_ms + span.end_ms) / 2.0 * US_PER_MS


def save_trace(timelines: Sequence[Timeline], path: str | os.PathLike[str]) -> None:
    """Write timelines as a file of trace events. Raises FileError on failure; an existing file is then unchanged."""
    write_whole(path, json.dumps(trace_events(timelines)))
