"""Reports for people: timelines in the terminal, as files for Perfetto, and as pictures."""

from fxsplit.report.perfetto import save_trace, trace_events
from fxsplit.report.picture import save_picture
from fxsplit.report.terminal import draw

__all__ = ["draw", "save_picture", "save_trace", "trace_events"]
