"""Reports for people: timelines in the terminal, pictures of plans and timelines, and traces for Perfetto."""

from fxsplit.report.perfetto import save_trace, trace_events
from fxsplit.report.picture import save_devices_picture, save_picture, save_plan_picture, save_replay_picture
from fxsplit.report.terminal import draw

__all__ = [
    "draw",
    "save_devices_picture",
    "save_picture",
    "save_plan_picture",
    "save_replay_picture",
    "save_trace",
    "trace_events",
]
