"""Records: the text of a fact, as values by name and tables:

fact Machine {
  devices {
    name   torch_device  memory_bytes
    cpu:0  cpu           inf
    cpu:1  cpu           inf
  }
  links (inf,)
}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, NoReturn, TypeVar

from fxsplit.errors import FxsplitError, suggest
from fxsplit.ir.text.tokens import Token, Tokens, describe
from fxsplit.ir.text.values import WIDTH, read_value, write_word
from fxsplit.system.figures import show

T = TypeVar("T")
Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """What reading a fact may need besides its text.

    - `torch`: make torch's own devices; otherwise only keep their names, and do not load torch
    - `find_moments(workload, machine)`: returns the moments of a workload, which follow from its schedule and are not
      stored
    """

    torch: bool = False
    find_moments: Callable[[Any, Any], Any] = lambda workload, machine: None


@dataclass
class Record:
    """The fields of a fact: `values` by name, where a table is a list of rows. `comments` are lines for human readers.

    A record that was read from a text also has `tokens`, and the place `at` of each field, for error messages.
    """

    kind: str
    values: dict[str, Any]
    comments: Sequence[str] = ()
    tokens: Tokens | None = field(default=None, compare=False)
    at: dict[str, Token] = field(default_factory=dict, compare=False)
    source: Source = field(default_factory=lambda: Source(), compare=False)

    def fail(self, what: str, name: str = "") -> NoReturn:
        """Raise IRSyntaxError at the field `name`, or at the beginning of the fact if there is no such field."""
        assert self.tokens is not None
        self.tokens.fail(f"fact {self.kind}: {what}", self.at.get(name, self.at[""]))

    def make(self, cls: type[T], known: Row | None = None) -> T:
        """Return `cls(...)` of the record's fields and the `known` ones.

        Raises IRSyntaxError for a wrong name or value.
        """
        return self.make_row(cls, {**self.values, **(known or {})}, "")

    def make_row(self, cls: type[T], row: Row, name: str) -> T:
        """Return `cls(...)` of the values in a row of the table `name`.

        Raises IRSyntaxError for wrong or missing values.
        """
        expected = self.check_row(cls, row, name)
        missing = [key for key, f in expected.items() if f.default is MISSING and f.default_factory is MISSING]
        lacking = next((key for key in missing if key not in row), None)
        if lacking is not None:
            self.fail(f"{lacking!r} is missing", name)
        try:
            return cls(**row)
        except (FxsplitError, TypeError, ValueError, AttributeError) as error:
            return self.fail(str(error), name)

    def check_row(self, cls: type[Any], row: Row, name: str) -> dict[str, Field[Any]]:
        """Return the fields of `cls` by name. Raises IRSyntaxError if the row has an unknown name or a wrong value."""
        expected = {f.name: f for f in fields(cls) if f.init}
        odd = next((key for key in row if key not in expected), None)
        if odd is not None:
            self.fail(f"there is no {odd!r}: it has {', '.join(expected)}{suggest(odd, expected)}", name or odd)
        for key, value in row.items():
            fits, words = _KINDS.get(str(expected[key].type), (None, ""))
            if fits is not None and not fits(value):
                of = f" of {row['name']!r}" if name and key != "name" and isinstance(row.get("name"), str) else ""
                self.fail(f"{key}{of} is {show(value)}: give {words}", name or key)
        return expected

    def choose(self, name: str, value: Any, among: Sequence[Any]) -> Any:
        """Return `value` if it is one of `among`. Raises IRSyntaxError at the field `name` otherwise."""
        if value not in among:
            self.fail(f"{name} is {show(value)}: give one of {', '.join(map(write_word, among))}", name)
        return value

    def read_rows(self, cls: type[T], name: str) -> tuple[T, ...]:
        """Return an object of `cls` for each row of the table `name`, which may be missing."""
        return tuple(self.make_row(cls, row, name) for row in self.take_rows(name))

    def take_rows(self, name: str) -> list[Row]:
        """Return the rows of the table `name`, which may be missing; raises IRSyntaxError if it is no table."""
        # An empty table has no columns to name.
        rows = [] if self.values.get(name, ()) == () else self.values[name]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            self.fail(f"{name} must be a table: {name} {{, a line of names, lines of values, }}", name)
        return rows


def _is_tuple_of(kind: type, value: Any) -> bool:
    return isinstance(value, tuple) and all(type(item) is kind for item in value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


_NAMES = (lambda v: _is_tuple_of(str, v), "names in round brackets, such as (a, b)")
_COUNTS = (lambda v: _is_tuple_of(int, v), "whole numbers in round brackets, such as (2, 1)")
_KINDS: dict[str, tuple[Any, str]] = {
    "str": (lambda v: isinstance(v, str), "a word, or a text in quotes"),
    "bool": (lambda v: isinstance(v, bool), "true or false"),
    "int": (lambda v: type(v) is int, "a whole number"),
    "float": (_is_number, "a number"),
    "float | None": (lambda v: v is None or _is_number(v), "a number or none"),
    "tuple[str, ...]": _NAMES,
    "tuple[int, ...]": _COUNTS,
    "tuple[float, ...]": (
        lambda v: isinstance(v, tuple) and all(map(_is_number, v)),
        "numbers in round brackets, such as (1.5, inf)",
    ),
    "tuple[tuple[int, ...], ...]": (
        lambda v: isinstance(v, tuple) and all(_is_tuple_of(int, inner) for inner in v),
        "lists of whole numbers, such as ((0, 1), (2,))",
    ),
    "tuple[tuple[str, ...], ...]": (
        lambda v: isinstance(v, tuple) and all(_is_tuple_of(str, inner) for inner in v),
        "lists of names, such as ((a, b), (c, d))",
    ),
    "tuple[tuple[str, str], ...]": (
        lambda v: isinstance(v, tuple) and all(_is_tuple_of(str, inner) and len(inner) == 2 for inner in v),
        "pairs of names, such as ((a, b), (c, d))",
    ),
    "dict[str, str]": (
        lambda v: isinstance(v, dict) and all(isinstance(k, str) and isinstance(s, str) for k, s in v.items()),
        'texts by name, such as {torch: "2.8"}',
    ),
    "Mapping[str, int]": (
        lambda v: isinstance(v, dict) and all(isinstance(k, str) and type(n) is int for k, n in v.items()),
        "whole numbers by name, such as {layer1: 0}",
    ),
    "Mapping[int, tuple[int, ...]]": (
        lambda v: isinstance(v, dict) and all(type(k) is int and _is_tuple_of(int, n) for k, n in v.items()),
        "lists of whole numbers by number, such as {1: (1,), 2: (2, 1)}",
    ),
}
"""For each type of a field, a check of its values and a description of them."""


def list_values(record: Any, *, leave_out: Sequence[str] = ()) -> Row:
    """Return the fields of a dataclass object that differ from their defaults, by name, in their order."""
    found = {}
    for f in fields(record):
        value = getattr(record, f.name)
        default = f.default if f.default_factory is MISSING else f.default_factory()
        # 1 == 1.0 == True, but the text should tell an int, a float and a bool apart.
        if f.init and f.name not in leave_out and (type(value) is not type(default) or value != default):
            found[f.name] = value
    return found


def order_columns(cls: Any, records: Sequence[Any]) -> list[Row]:
    """Return dataclass objects as rows of a table. A column is left out if all objects have the default in it.

    Long texts come last. Otherwise a reader would have to look for the figures after them.
    """
    rows = [list_values(record) for record in records]
    used = [f.name for f in fields(cls) if any(f.name in row for row in rows)]
    used.sort(key=lambda name: _LAST.index(name) if name in _LAST else -1)
    return [{name: getattr(record, name) for name in used} for record in records]


_LAST = ("made", "op", "signature", "nodes")
"""The columns with long texts, which come last in a table."""


def write_record(record: Record) -> str:
    """Return the text of a fact."""
    lines = [f"fact {write_word(record.kind)} {{"]
    for name, value in record.values.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines += [f"  {name} {{", *(f"    {line}" for line in _write_table(value)), "  }"]
        else:
            lines.append(f"  {name} {_wrap(value, 4)}")
    lines += [f"  ; {line}".rstrip() for line in record.comments]
    return "\n".join([*lines, "}"])


def _write_table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table: the names of the columns, and a line for each row."""
    # A row may lack a column: `-` stands there, and the field has its default.
    heads = list(dict.fromkeys(key for row in rows for key in row))
    cells = [heads, *([_wrap(row[head], 6) if head in row else "-" for head in heads] for row in rows)]
    # A list that takes several lines can only be in the last column.
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _wrap(value: Any, indent: int) -> str:
    """Return a value as text. A long list takes several lines, indented by `indent`."""
    text = write_word(value)
    if len(text) <= WIDTH or not isinstance(value, (list, tuple)) or not value:
        return text
    lines = [text[0]]
    for position, item in enumerate(map(write_word, value)):
        item += "," if position + 1 < len(value) or (len(value) == 1 and text[0] == "(") else ""
        if len(lines) == 1 or len(lines[-1]) + len(item) + 1 > WIDTH:
            lines.append(f"{' ' * indent}{item}")
        else:
            lines[-1] += f" {item}"
    return "\n".join([*lines, f"{' ' * (indent - 2)}{text[-1]}"])


def read_record(tokens: Tokens) -> Record:
    """Return the fact at the next token, `fact KIND {`; raises IRSyntaxError."""
    begin = tokens.expect("fact", "a fact")
    record = Record(tokens.take_word("the kind of a fact"), {}, tokens=tokens, at={"": begin})
    tokens.expect("{", "a fact")
    tokens.end_line("'{'")
    while not tokens.accept("}"):
        if tokens.next.kind in ("newline", "comment"):
            tokens.take()
            continue
        at = tokens.next
        name = tokens.take_word("the name of a field")
        if name in record.values:
            tokens.fail(f"{name!r} appears twice in this fact", at)
        record.at[name] = at
        record.values[name] = _read_field(tokens)
    tokens.end_line("'}'")
    return record


_LINE_ENDS = re.compile(r"[ \t\r]*(?:;[^\n]*)?(?:\n|$)")


def _read_field(tokens: Tokens) -> Any:
    """Return the value of a field, or the rows of a table."""
    if tokens.next.text == "{" and _LINE_ENDS.match(tokens.text, tokens.next.end):
        tokens.take()
        tokens.end_line("'{'")
        return _read_table(tokens)
    value = read_value(tokens)
    tokens.end_line("a field")
    return value


def _read_table(tokens: Tokens) -> list[Row]:
    """Return the rows of a table, up to its closing brace."""
    heads: list[str] = []
    rows: list[Row] = []
    while not tokens.accept("}"):
        if tokens.next.kind in ("newline", "comment"):
            tokens.take()
            continue
        if not heads:
            while tokens.next.kind in ("word", "string"):
                heads.append(tokens.take_word("the name of a column"))
            if len(set(heads)) < len(heads) or not heads:
                tokens.fail("the columns of a table need names, each its own")
            tokens.end_line("the names of columns")
            continue
        rows.append(_read_row(tokens, heads))
    tokens.end_line("'}'")
    return rows


def _read_row(tokens: Tokens, heads: Sequence[str]) -> Row:
    """Return a row of a table by the names of its columns; `-` leaves a value out."""
    row = {}
    for head in heads:
        if tokens.next.kind in ("newline", "comment", "end"):
            tokens.fail(f"the row ends before the column {head!r}, before {describe(tokens.next)}")
        if tokens.next.kind == "word" and tokens.next.text == "-":
            tokens.take()
            continue
        row[head] = read_value(tokens)
    tokens.end_line("a row")
    return row
