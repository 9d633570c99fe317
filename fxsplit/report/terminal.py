"""A timeline in the terminal: one line for each device and link, one block for each action, as wide as it takes long.

1F1B on two devices with two microbatches, in 18 columns:

    a 0 1 .... 0  .. 1
    b ..0  0  1  1  ....
"""

from __future__ import annotations

from rich.text import Text

from fxsplit.schedule.action import Action
from fxsplit.schedule.timeline import Timeline

COLOURS = {"F": "white on blue", "B": "black on green", "I": "black on cyan", "W": "black on yellow"}
OTHER = "white on magenta"


def draw(timeline: Timeline, width: int = 100) -> Text:
    """Return the drawing, at most `width` characters wide, with as many lines as there are devices and links.

    A block bears the number of its microbatch where it is wide enough, and dashes where it is not. Its colour is the
    operation: blue for F, green for B, cyan for I, yellow for W, magenta for all else. Later stages of a device
    are dim. Dots are idle time.
    """
    label = max((len(name) for name, _ in timeline.rows), default=0) + 1
    columns = max(1, width - label)
    # Columns for each millisecond.
    scale = columns / timeline.length_ms if timeline.length_ms else 0.0
    text = Text(no_wrap=True)
    for name, spans in timeline.rows:
        text.append(f"{name:<{label}}")
        first = min((span.action.stage for span in spans), default=0)
        at = 0
        for action, begin_ms, end_ms in spans:
            # A block of less than a column is not drawn, and two blocks never overlap: `at` is the first free column.
            begin, end = round(begin_ms * scale), round(end_ms * scale)
            text.append("." * (begin - at), style="dim")
            if end > max(begin, at):
                style = COLOURS.get(action.op, OTHER) + (" dim" if action.stage > first else "")
                text.append(_fill_block(action, end - max(begin, at)), style=style)
            at = max(at, begin, end)
        text.append("." * (columns - at) + "\n", style="dim")
    return text


def _fill_block(action: Action, width: int) -> str:
    """Return the number of the microbatch, or the operation where it has none, in `width` characters."""
    # A sum over replicas has no microbatch.
    number = str(action.microbatch) if action.microbatch >= 0 else action.op
    return f"{number:^{width}}" if len(number) <= width else "-" * width
