"""What people look at: timelines in the terminal, for Perfetto, and as pictures."""

from fxsplit.report.drawing import draw
from fxsplit.report.picture import save_picture
from fxsplit.report.trace_events import save_trace, trace_events

__all__ = ["draw", "save_picture", "save_trace", "trace_events"]
