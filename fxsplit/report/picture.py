"""Timelines as a picture, one above the other on one scale: predicted above measured, for example."""

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
"""Marks that tell the halves of a backward from the whole and from forwards, also where there is no colour."""
KINDS = (".svg", ".png", ".pdf")
INCHES_A_LANE, INCHES_WIDE = 0.35, 10.0
LONGEST = 44
"""How many characters stand beside a row."""
FAINTER = 0.25
"""How much paler the blocks of each further stage of one device are."""


def save_picture(timelines: Sequence[Timeline], path: str | os.PathLike[str]) -> None:
    """Draw timelines with matplotlib: a row for each device and link, a block for each action with its microbatch.

    Raises InputError for a path that ends in anything but .svg, .png or .pdf, and where matplotlib is missing, and
    FileError where the file cannot be written.
    """
    kind = Path(path).suffix
    if kind not in KINDS:
        raise InputError(f"cannot draw {os.fspath(path)!r}: end its name in {', '.join(KINDS)}")
    try:
        from matplotlib.figure import Figure  # a second to load, and only for pictures
        from matplotlib.patches import Patch
    except ImportError as error:
        raise InputError("pictures need matplotlib: pip install 'fxsplit[picture]'") from error
    # At least one lane, as matplotlib takes no height of zero.
    lanes = [max(1, len(t.rows)) for t in timelines]
    figure = Figure(figsize=(INCHES_WIDE, INCHES_A_LANE * sum(lanes) + 0.8 * len(lanes)), layout="constrained")
    axes = figure.subplots(len(timelines), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": lanes})[:, 0]
    # The legend has the kinds of actions that occur, in the order in which they do.
    seen: dict[str, tuple[str, str]] = {}
    for axis, timeline in zip(axes, timelines, strict=True):
        for lane, (_, spans) in enumerate(timeline.rows):
            stages = sorted({span.action.stage for span in spans})
            for action, begin_ms, end_ms in spans:
                colour = COLOURS.get(action.op, OTHER)
                seen.setdefault((NAMES | SENDS).get(action.op, action.op.lower()), (colour, action.op))
                # Beyond a few stages all are equally pale, or they could not be seen.
                pale = max(0.3, 1.0 - FAINTER * stages.index(action.stage))
                looks: Any = {"color": colour, "edgecolor": "white", "lw": 0.4, "hatch": HATCHES.get(action.op)}
                axis.barh(lane, end_ms - begin_ms, left=begin_ms, alpha=pale, **looks)
                # A number that is wider than its block could not be told from its neighbours'.
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
    # matplotlib would leave half a picture where the disk is full.
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format=kind[1:])
    write_whole(path, picture.getvalue())


def _shorten(label: str) -> str:
    """Return a label of at most LONGEST characters a line, without the middle of longer ones: they take the room."""
    lines = label.split("\n")
    half = LONGEST // 2 - 1
    return "\n".join(line if len(line) <= LONGEST else f"{line[:half]}...{line[-half:]}" for line in lines)
