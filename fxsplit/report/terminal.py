"""A timeline in the terminal: one line a device, one block an action, its width its time."""

from __future__ import annotations

from rich.text import Text

from fxsplit.schedule.action import Action
from fxsplit.schedule.timeline import Timeline

COLOURS = {"F": "white on blue", "B": "black on green", "I": "black on cyan", "W": "black on yellow"}
OTHER = "white on magenta"


def draw(timeline: Timeline, width: int = 100) -> Text:
    """Return the drawing, at most `width` characters wide; a block bears its microbatch where it is wide enough.

    The colour is the operation (blue F, green B, cyan I, yellow W, magenta the rest) and brightness the stage: later
    stages of one device are dim. Dots are idle time.
    """
    label = max((len(name) for name in timeline.devices), default=0) + 1
    columns = max(1, width - label)
    scale = columns / timeline.length_ms if timeline.length_ms else 0.0
    text = Text(no_wrap=True)
    for name, spans in zip(timeline.devices, timeline.spans, strict=True):
        text.append(f"{name:<{label}}")
        first = min((span.action.stage for span in spans), default=0)
        at = 0
        for action, begin_ms, end_ms in spans:
            begin, end = round(begin_ms * scale), round(end_ms * scale)
            text.append("." * (begin - at), style="dim")
            if end > max(begin, at):
                text.append(_block(action, end - max(begin, at)), style=_style(action, first))
            at = max(at, begin, end)
        text.append("." * (columns - at) + "\n", style="dim")
    return text


def _block(action: Action, width: int) -> str:
    """Return the microbatch in so many characters, or as much as fits."""
    number = str(action.microbatch) if action.microbatch >= 0 else action.op
    return f"{number:^{width}}" if len(number) <= width else "-" * width


def _style(action: Action, first: int) -> str:
    """Return the colours of an action."""
    return COLOURS.get(action.op, OTHER) + (" dim" if action.stage > first else "")
