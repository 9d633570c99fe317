"""Timelines as trace events in JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing.

    {"traceEvents": [{"name": "0F0", "cat": "forward", "ph": "X", "ts": 0.0, "dur": 1000.0, "pid": 0, "tid": 0}, ...]}

`ts` and `dur` are in microseconds. `ph` is the kind of event: M names a row, X is a span, C sets a counter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from fxsplit.schedule.action import NAMES, SENDS
from fxsplit.schedule.simulation.timeline import Timeline
from fxsplit.system.files import write_whole

US_PER_MS = 1000.0


def trace_events(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return timelines as one JSON object.

    Each timeline is a process, each of its devices and links is a thread, and a counter shows a device's memory in
    bytes.
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
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(timelines: Sequence[Timeline], path: str | os.PathLike[str]) -> None:
    """Write timelines as a file of trace events. Raises FileError on failure; an existing file is then unchanged."""
    write_whole(path, json.dumps(trace_events(timelines)))
