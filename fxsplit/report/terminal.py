"""A timeline in the terminal: one line for each device and link, one block for each action, as wide as its time.

1F1B on two devices with two microbatches, in 18 columns:

    a F0F1....B0 ..B1
    b ..F0B0  F1B1  ....
    F forward  B backward  . idle
"""

from __future__ import annotations

from rich.text import Text

from fxsplit.schedule.action import NAMES, SEND_B, SEND_F, SENDS, Action
from fxsplit.schedule.simulation.timeline import Timeline
from fxsplit.system.shown import WIDTH

COLOURS = {"F": "white on blue", "B": "black on green", "I": "black on cyan", "W": "black on yellow"}
OTHER = "white on magenta"
LETTERS = {op: op for op in NAMES} | {SEND_F: "f", SEND_B: "b"}
"""The first letter of a block, so that operations are distinct without colours too."""


def draw(timeline: Timeline, width: int = WIDTH) -> Text:
    """Draw a line of at most `width` characters for each device and link, and a legend below.

    A block shows the letter of its operation and the number of its microbatch, or the letter and dashes if it is too
    narrow for both. The colour shows the operation: blue for F, green for B, cyan for I, yellow for W, magenta for all
    other. Later stages of a device are dim. Dots are idle time.
    """
    label = max((len(name) for name, _ in timeline.rows), default=0) + 1
    columns = max(1, width - label)
    # Columns per millisecond.
    scale = columns / timeline.length_ms if timeline.length_ms else 0.0
    text = Text(no_wrap=True)
    for name, spans in timeline.rows:
        text.append(f"{name:<{label}}")
        first = min((span.action.stage for span in spans), default=0)
        at = 0
        for action, begin_ms, end_ms in spans:
            # Skip a block narrower than one column. Blocks never overlap: `at` is the first free column.
            begin, end = round(begin_ms * scale), round(end_ms * scale)
            text.append("." * (begin - at), style="dim")
            if end > max(begin, at):
                style = COLOURS.get(action.op, OTHER) + (" dim" if action.stage > first else "")
                text.append(_fill_block(action, end - max(begin, at)), style=style)
            at = max(at, begin, end)
        text.append("." * (columns - at) + "\n", style="dim")
    ops = {span.action.op for _, spans in timeline.rows for span in spans}
    if ops:
        text.append(_make_legend(ops, width))
    return text


def _make_legend(ops: set[str], width: int) -> Text:
    """Return lines of at most `width` characters that explain the letters, in their colours.

    An entry that is longer has a line of its own.
    """
    entries = [(LETTERS[op], name, COLOURS.get(op, OTHER)) for op, name in (NAMES | SENDS).items() if op in ops]
    legend, line = Text(), 0
    for letter, name, style in [*entries, (".", "idle", "")]:
        length = len(f"{letter} {name}")
        if line:
            joined = line + 2 + length <= width
            legend.append("  " if joined else "\n")
            line = line + 2 if joined else 0
        legend.append(letter, style=style)
        legend.append(f" {name}")
        line += length
    return legend.append("\n")


def _fill_block(action: Action, width: int) -> str:
    """Return a block's text of `width` characters: operation and microbatch."""
    letter = LETTERS.get(action.op, "")
    # A reduction over replicas has no microbatch, and shows its name.
    label = f"{letter}{action.microbatch}" if letter else action.op
    return f"{label:^{width}}" if len(label) <= width else f"{letter:-<{width}}"
