"""Results of a search in an object: a value, a name for the place that holds it, and the place, if writable."""

from __future__ import annotations

from typing import Any, NamedTuple

from fxsplit.ir.facts.capture.python_state import Place, is_plain

ITEMS, VARIABLE, CONTENTS, STATE = "[items]", "[variable]", "[contents]", "[state]"
"""Names for places without a name: a container's items, a closure's variable, an array's values, an iterator's state.

Code that holds the object reads the first three. Reading an iterator changes its state.
"""


class Label(NamedTuple):
    """A name for a place: the kind of object at which the search began, and the path from that object.

    kind: for example "attribute", for attributes of the model.
    library: whether the place belongs to Python, torch or an installed package.
    """

    kind: str
    path: str
    library: bool = False

    def of(self, name: str) -> Label:
        """Return the label of an attribute of the object that has this label."""
        return self._replace(path=f"{self.path}.{name}" if self.path else name)

    def at(self, key: Any) -> Label:
        """Return the label of an item of the object that has this label."""
        return self._replace(path=f"{self.path}[{key!r}]" if is_plain(key) else f"{self.path}[...]")

    def __str__(self) -> str:
        if self.kind != "attribute":
            return f"{self.kind} {self.path!r}"
        return f"attribute {self.path!r} of the model" if self.path else "the attributes of the model"


class Finding(NamedTuple):
    """A value that a search has found, with the label of its place.

    - `name`: the place's name in code, or one of ITEMS, VARIABLE, CONTENTS and STATE
    - `key`: identifies the place
    - `place`: None if the value cannot be replaced there
    """

    value: Any
    label: Label
    name: str = ""
    place: Place | None = None
    key: tuple[int, str] = (0, "")
