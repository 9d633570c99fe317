"""The base class of results that show themselves as tables, in print(), in notebooks and on the command line.

A result defines its tables and lines, and a one-line summary:

    class Sizes(Shown):
        def show(self):
            return [Table(("layer", ">bytes"), [("embed", 4096)]), "1 layer"]
        def summarise(self):
            return "1 layer"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, TypeAlias

WIDTH = 80
"""The largest width of a table in characters, unless more room is known."""
WIDE = 120
"""The width in notebooks, which have more room."""


@dataclass(frozen=True)
class Table:
    """Heads of columns, and rows of cells. A `>` before a head right-aligns its column, for numbers."""

    heads: Sequence[str]
    rows: Sequence[Sequence[object]]


Parts: TypeAlias = "Iterable[Table | str]"
"""The contents of a result, in order: tables, and separate lines."""


class Shown:
    """Base of results: print() and notebooks show tables, and repr() shows one line."""

    def show(self) -> Parts:
        """Return the tables and lines to show."""
        raise NotImplementedError

    def summarise(self) -> str:
        """Return the text between the parentheses of repr()."""
        raise NotImplementedError

    def embed(self) -> str:
        """Return a picture as HTML, for notebooks; empty for a result without one."""
        return ""

    def __str__(self) -> str:
        return render(self.show())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.summarise()})"

    def _repr_html_(self) -> str:
        """The picture and the tables as HTML, for notebooks."""
        return self.embed() + render_html(self.show())


def render(parts: Parts, width: int = WIDTH) -> str:
    """Return tables and lines as text. A cell too long for its column continues on the next line."""
    return "\n".join(part if isinstance(part, str) else _render_table(part, width) for part in parts)


def render_html(parts: Parts) -> str:
    """Return tables and lines as HTML."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=StringIO(), record=True, width=WIDE, force_jupyter=False)
    for part in parts:
        console.print(Text(part) if isinstance(part, str) else _make_table(part))
    page = '<pre style="white-space: pre-wrap; line-height: normal">{code}</pre>'
    return console.export_html(inline_styles=True, code_format=page)


def _render_table(table: Table, width: int) -> str:
    """Return a table as text, at most `width` characters wide."""
    # rich takes a tenth of a second to import, which programs without output can skip.
    from rich.console import Console

    text = StringIO()
    # No escape codes and a fixed width: the text is the same everywhere.
    Console(file=text, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(
        _make_table(table)
    )
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))


def _make_table(table: Table) -> Any:
    """Return a rich table without lines between rows and columns."""
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in table.heads:
        # Fold cells, so that no character is lost in a narrow column.
        made.add_column(
            Text(head.removeprefix(">")), justify="right" if head.startswith(">") else "left", overflow="fold"
        )
    for row in table.rows:
        # Use Text, since rich would interpret [brackets] in a plain string as style.
        made.add_row(*(Text(str(cell)) for cell in row))
    return made
