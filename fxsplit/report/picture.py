"""Timelines as a picture, one above the other on one scale, for example predicted above measured."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxsplit.errors import InputError
from fxsplit.schedule.action import NAMES, SENDS
from fxsplit.schedule.simulation.timeline import Timeline
from fxsplit.system.files import write_whole

COLOURS = {"F": "#4c78a8", "B": "#54a24b", "I": "#72b7b2", "W": "#eeca3b"}
OTHER = "#b279a2"
HATCHES = {"I": "////", "W": "xxxx"}
"""Hatches distinguish the halves of a backward from a whole one, even without colours."""
KINDS = (".svg", ".png", ".pdf")
INCHES_A_LANE, INCHES_WIDE = 0.35, 10.0
LONGEST = 44
"""The largest number of characters in a row's label."""
FAINTER = 0.25
"""How much paler the blocks of each further stage of a device are."""


def save_picture(timelines: Sequence[Timeline], path: str | os.PathLike[str]) -> None:
    """Draw timelines with matplotlib: a row for each device and link, a block for each action with its microbatch.

    Raises InputError unless the path ends in .svg, .png or .pdf and matplotlib is installed, and FileError if the file
    cannot be written.
    """
    kind = Path(path).suffix
    if kind not in KINDS:
        raise InputError(f"cannot draw {os.fspath(path)!r}: end its name in {', '.join(KINDS)}")
    try:
        from matplotlib.figure import Figure  # takes a second to import, and only pictures need it
        from matplotlib.patches import Patch
    except ImportError as error:
        raise InputError("pictures need matplotlib: pip install 'fxsplit[picture]'") from error
    # At least one lane, since matplotlib rejects a height of 0.
    lanes = [max(1, len(t.rows)) for t in timelines]
    figure = Figure(figsize=(INCHES_WIDE, INCHES_A_LANE * sum(lanes) + 0.8 * len(lanes)), layout="constrained")
    axes = figure.subplots(len(timelines), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": lanes})[:, 0]
    # The legend lists the kinds of actions in the order of their first appearance.
    seen: dict[str, tuple[str, str]] = {}
    for axis, timeline in zip(axes, timelines, strict=True):
        for lane, (_, spans) in enumerate(timeline.rows):
            stages = sorted({span.action.stage for span in spans})
            for action, begin_ms, end_ms in spans:
                colour = COLOURS.get(action.op, OTHER)
                seen.setdefault((NAMES | SENDS).get(action.op, action.op.lower()), (colour, action.op))
                # Limit paleness, so that blocks of many stages stay visible.
                pale = max(0.3, 1.0 - FAINTER * stages.index(action.stage))
                looks: Any = {"color": colour, "edgecolor": "white", "lw": 0.4, "hatch": HATCHES.get(action.op)}
                axis.barh(lane, end_ms - begin_ms, left=begin_ms, alpha=pale, **looks)
                # Omit a number that is wider than its block and would run into its neighbours.
                if action.microbatch >= 0 and end_ms - begin_ms > 0.012 * timeline.length_ms:
                    middle = (begin_ms + end_ms) / 2
                    axis.text(middle, lane, str(action.microbatch), ha="center", va="center", fontsize=6)
        axis.set_yticks(range(len(timeline.rows)), [_shorten(label) for label in timeline.labels], fontsize=7)
        axis.invert_yaxis()
        axis.set_title(f"{timeline.title}: {timeline.length_ms:.4g} ms", fontsize=9, loc="left")
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel("ms", fontsize=8)
    handles = [
        Patch(facecolor=colour, edgecolor="white", hatch=HATCHES.get(op), label=name)
        for name, (colour, op) in seen.items()
    ]
    figure.legend(handles=handles, ncols=len(handles), fontsize=7, loc="outside lower right", frameon=False)
    # Draw in memory first: on a full disk matplotlib would leave half a picture.
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format=kind[1:])
    write_whole(path, picture.getvalue())


def _shorten(label: str) -> str:
    """Cut the middle out of lines longer than LONGEST characters, to leave room for the drawing."""
    lines = label.split("\n")
    half = LONGEST // 2 - 1
    return "\n".join(line if len(line) <= LONGEST else f"{line[:half]}...{line[-half:]}" for line in lines)
