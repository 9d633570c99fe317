"""Shown: results as tables, alike in print(), in notebooks and in what the command prints.

A result says what it shows, as tables and lines, and in one line what it is:

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
"""How many characters a line of a table has at most, unless there is more room."""
WIDE = 120
"""The same in notebooks, which have room."""


@dataclass(frozen=True)
class Table:
    """Heads of columns, and rows of cells. A head that begins with `>` has its column to the right, as figures are."""

    heads: Sequence[str]
    rows: Sequence[Sequence[object]]


Parts: TypeAlias = "Iterable[Table | str]"
"""What is shown, in order: tables, and lines that stand by themselves."""


class Shown:
    """Base of results: print() and notebooks show tables, and repr() is one line."""

    def show(self) -> Parts:
        """Return the tables and lines that are shown."""
        raise NotImplementedError

    def summarise(self) -> str:
        """Return what stands between the brackets of repr()."""
        raise NotImplementedError

    def __str__(self) -> str:
        """The tables as text."""
        return render(self.show())

    def __repr__(self) -> str:
        """One line."""
        return f"{type(self).__name__}({self.summarise()})"

    def _repr_html_(self) -> str:
        """The tables as HTML, for notebooks."""
        return render_html(self.show())


def render(parts: Parts, width: int = WIDTH) -> str:
    """Return tables and lines as text. What is too long for its column goes on in the next line of that column."""
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
    # rich takes a tenth of a second to load, which programs that show nothing need not wait for.
    from rich.console import Console

    text = StringIO()
    # Escapes and wide terminals are for who prints: this text is the same everywhere.
    Console(file=text, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(
        _make_table(table)
    )
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))


def _make_table(table: Table) -> Any:
    """Return a table of rich, without lines between rows and columns."""
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in table.heads:
        # Folded, so that no character of a cell is left out, however narrow the column is.
        made.add_column(
            Text(head.removeprefix(">")), justify="right" if head.startswith(">") else "left", overflow="fold"
        )
    for row in table.rows:
        # As Text: in a plain string rich would read [brackets] as marks of style.
        made.add_row(*(Text(str(cell)) for cell in row))
    return made
