"""The passes of a chain for a report: seconds, noted figures, and changes to the text of the IR."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from fxsplit.ir.graph import IR, Step
from fxsplit.ir.observers import drop_steps
from fxsplit.ir.text.write import render
from fxsplit.report.page.story import PassRow

MOST_LINES, MOST_WIDE = 60, 160
"""The most changed lines of a pass that a report shows, and the most characters of a line."""
MOST_COMPARED = 40_000
"""Longer texts are not compared: that would take minutes."""

_NODE = re.compile(r"^  %(?P<name>\S+) = .*  ; (?P<note>.*)$", re.MULTILINE)


def list_passes(ir: IR) -> list[PassRow]:
    """Return the passes of an IR, with their changes if all IRs before them are known."""
    irs: list[IR] = []
    at: IR | None = ir
    while at is not None:
        irs.append(at)
        at = at.earlier
    found = []
    for before, after in zip(irs[:0:-1], irs[-2::-1], strict=True):
        # An IR from a file follows the captured one without a step.
        if len(after.steps) == len(before.steps) + 1:
            found.append(compare_texts(after.steps[-1], render(before), render(after)))
    return found if len(found) == len(ir.steps) else [PassRow(s.text, s.seconds, s.noted) for s in ir.steps]


def compare_texts(step: Step, before: str, after: str) -> PassRow:
    """Return a pass with its changes to the text of the IR."""
    old, new = drop_steps(before).splitlines(), drop_steps(after).splitlines()
    if len(old) + len(new) > MOST_COMPARED:
        return PassRow(step.text, step.seconds, step.noted)
    lines = [line for line in difflib.unified_diff(old, new, lineterm="", n=1) if not line.startswith(("---", "+++"))]
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    shown = [line if len(line) <= MOST_WIDE else f"{line[:MOST_WIDE]} ..." for line in lines[:MOST_LINES]]
    if len(lines) > MOST_LINES:
        shown.append(f"... {len(lines) - MOST_LINES} more lines")
    return PassRow(step.text, step.seconds, step.noted, added, removed, tuple(shown))


def read_notes(text: str) -> dict[str, str]:
    """Return the layer and the line in the source of each node, from the text of an IR with the user's modules."""
    return {found["name"]: found["note"] for found in _NODE.finditer(text)}


def make_steps(entries: Sequence[Mapping[str, object]]) -> list[Step]:
    """Return the steps in the mark of a dump folder; raises KeyError, TypeError or ValueError for other entries."""
    found = []
    for entry in entries:
        noted = entry["noted"]
        if not isinstance(noted, dict):
            raise TypeError("noted is no object")
        found.append(Step(str(entry["pass"]), float(str(entry["seconds"])), {str(k): v for k, v in noted.items()}))
    return found
