"""Results of a search in an object: a value, the name of its place for messages, and the place, if it is writable."""

from __future__ import annotations

from typing import Any, NamedTuple

from fxsplit.ir.facts.capture.python_state import Place, is_plain

ITEMS, VARIABLE, CONTENTS, STATE = "[items]", "[variable]", "[contents]", "[state]"
"""Special names: for the items of a container, a variable of a closure, the values of an array, an iterator's state.

Code that holds the object reads the first three, and changes the last by reading it.
"""


class Label(NamedTuple):
    """The kind of place that something was reached from, such as "attribute" of the model, and the path from there.

    `library`: the place belongs to Python, torch or an installed package.
    """

    kind: str
    path: str
    library: bool = False

    def of(self, name: str) -> Label:
        """Return the label of an attribute of this object."""
        return self._replace(path=f"{self.path}.{name}" if self.path else name)

    def at(self, key: Any) -> Label:
        """Return the label of an item of this object."""
        return self._replace(path=f"{self.path}[{key!r}]" if is_plain(key) else f"{self.path}[...]")

    def __str__(self) -> str:
        if self.kind != "attribute":
            return f"{self.kind} {self.path!r}"
        return f"attribute {self.path!r} of the model" if self.path else "the attributes of the model"


class Finding(NamedTuple):
    """A value in a place of an object, with the label of the place.

    - `name`: the place's name in code, or one of ITEMS, VARIABLE, CONTENTS and STATE
    - `key`: identifies the place
    - `place`: None if the value is only reached, and cannot be replaced there
    """

    value: Any
    label: Label
    name: str = ""
    place: Place | None = None
    key: tuple[int, str] = (0, "")
