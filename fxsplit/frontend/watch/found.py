"""What is found in an object: a value, what messages call its place, and the place, if others may write to it."""

from __future__ import annotations

from typing import Any, NamedTuple

from fxsplit.ir.facts.capture.python_state import Place, is_plain

ITEMS, VARIABLE, CONTENTS, STATE = "[items]", "[variable]", "[contents]", "[state]"
"""In place of a name: what a container holds, a variable of the code around a function, what an array holds, what an
iterator gives next.

Whoever holds the object reads the first three, and changes the last by reading it."""


class Label(NamedTuple):
    """What kind of place something was reached from, such as "attribute" of the model, and the path from there.

    library: whether that place is Python's, torch's or an installed package's.
    """

    kind: str
    path: str
    library: bool = False

    def of(self, name: str) -> Label:
        """Return the label of an attribute of this."""
        return self._replace(path=f"{self.path}.{name}" if self.path else name)

    def at(self, key: Any) -> Label:
        """Return the label of an item of this."""
        return self._replace(path=f"{self.path}[{key!r}]" if is_plain(key) else f"{self.path}[...]")

    def __str__(self) -> str:
        if self.kind != "attribute":
            return f"{self.kind} {self.path!r}"
        return f"attribute {self.path!r} of the model" if self.path else "the attributes of the model"


class Finding(NamedTuple):
    """What an object keeps in a place, and the label of that.

    name: what code calls the place, or one of ITEMS, VARIABLE, CONTENTS and STATE. key: tells the place from all
    others. Without a place the value is only reached, and nobody can put another one there.
    """

    value: Any
    label: Label
    name: str = ""
    place: Place | None = None
    key: tuple[int, str] = (0, "")
