"""Turn a command's results into Markdown: a table for each kind of finding, to read and to copy into the README."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.gpu.findings import Row, show


def format_report(report: dict[str, Any]) -> str:
    """Return a report as Markdown: the device, the outcome of each part, and the parts' findings."""
    device = ", ".join(f"{name} {value}" for name, value in report["device"].items() if name != "name")
    lines = [f"`python -m bench.gpu {report['command']}{' --dry' * report['dry']}`"]
    lines += [f"on {report['device']['name']}: {device}", ""]
    lines += format_table([{k: part[k] for k in ("part", "outcome", "seconds")} for part in report["parts"]])
    for part in report["parts"]:
        kinds = dict.fromkeys(row["what"] for row in part["rows"])
        for kind in kinds:
            rows = [{k: v for k, v in row.items() if k != "what"} for row in part["rows"] if row["what"] == kind]
            lines += ["", f"{part['part']}: {kind}", "", *format_table(rows)]
        if part["tail"]:
            lines += ["", f"{part['part']} ended so:", "```text", *part["tail"], "```"]
    return "\n".join(lines) + "\n"


def format_table(rows: Sequence[Row]) -> list[str]:
    """Return rows as lines of a Markdown table, with a column for each name in any of the rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([show(row.get(name, "")) for name in names] for row in rows)]
    # A bar or a line break inside a cell would end the cell.
    return [f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in line)} |" for line in lines]
