"""Scene: the shapes of a picture, in pixels from the top left, before they become SVG or an image.

A shape names a role, such as "ink" or "stage 2", and a theme has the colour of each role. So one scene is drawn light,
dark, and in the page of a report:

    Scene --+-- svg.py, with a theme or with the page's colours --> SVG
            +-- files.py, with a theme and matplotlib ------------> PNG, PDF
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Anchor: TypeAlias = Literal["start", "middle", "end"]
Pattern: TypeAlias = Literal["", "stripes", "cross", "dots"]
"""What lies over the colour of an area, so that areas differ without colours too."""
Role: TypeAlias = str

SMALL, NORMAL, LARGE = 10.0, 12.0, 15.0
"""Sizes of text in pixels."""
MONO_WIDTH, SANS_WIDTH = 0.602, 0.56
"""The width of a character in sizes of the text: exact in a monospaced font, and a mean in another font."""


@dataclass(frozen=True)
class Box:
    """A rectangle. `key` names the thing that it shows, for programs; `hint` says the same to people who point at it.

    `fill` is the role of its area, and `edge` that of its border, empty for none. `round` is the radius of its corners.
    """

    x: float
    y: float
    width: float
    height: float
    fill: Role
    edge: Role = ""
    pattern: Pattern = ""
    key: str = ""
    hint: str = ""
    round: float = 0.0
    dashed: bool = False


@dataclass(frozen=True)
class Stroke:
    """A line through points; with `curved`, the four points of a Bezier curve. `arrow` puts a head at its end."""

    points: Sequence[tuple[float, float]]
    role: Role = "line"
    width: float = 1.0
    dashed: bool = False
    curved: bool = False
    arrow: bool = False
    key: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Label:
    """One line of text. `x` is its start, middle or end, as `anchor` says, and `y` its base line.

    `mono` sets it in a monospaced font, for names in code.
    """

    x: float
    y: float
    text: str
    role: Role = "ink"
    size: float = NORMAL
    anchor: Anchor = "start"
    mono: bool = False
    bold: bool = False


Shape: TypeAlias = "Box | Stroke | Label"


@dataclass
class Scene:
    """Shapes in the order in which they are drawn. `name` is unique in a page, and `title` describes the picture.

    Pictures are read aloud as their title, so that it says the most important figures.
    """

    name: str
    title: str
    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Draw shapes over the present ones."""
        self.shapes += shapes

    def place(self, other: Scene, x: float, y: float) -> None:
        """Draw another scene with its top left corner at a point, and grow to hold it."""
        self.shapes += [move(shape, x, y) for shape in other.shapes]
        self.width, self.height = max(self.width, x + other.width), max(self.height, y + other.height)


def move(shape: Shape, x: float, y: float) -> Shape:
    """Return a shape, moved by `x` and `y`."""
    from dataclasses import replace

    if isinstance(shape, Stroke):
        return replace(shape, points=tuple((a + x, b + y) for a, b in shape.points))
    return replace(shape, x=shape.x + x, y=shape.y + y)


def measure(text: str, size: float = NORMAL, *, mono: bool = False) -> float:
    """Return the approximate width of a line of text in pixels."""
    return len(text) * size * (MONO_WIDTH if mono else SANS_WIDTH)


def fit(text: str, width: float, size: float = NORMAL, *, mono: bool = False) -> str:
    """Return a text that is at most `width` pixels wide; its beginning is cut off if it is longer.

    Paths of modules differ at their ends, so the end is kept. In `a .. b` the beginning of each path is cut off.
    """
    most = int(width / (size * (MONO_WIDTH if mono else SANS_WIDTH)))
    if len(text) <= most:
        return text
    first, joined, last = text.partition(" .. ")
    if joined and most > 12:
        half = (most - 4) // 2
        return f"{_cut(first, max(half, most - 4 - len(last)))} .. {_cut(last, max(half, most - 4 - len(first)))}"
    return _cut(text, most)


def _cut(text: str, most: int) -> str:
    """Return the end of a text that has more than `most` characters, from a dot on if one is near."""
    if len(text) <= most:
        return text
    if most < 3:
        return ""
    tail = text[len(text) - most + 1 :]
    dot = tail.find(".")
    return f"\N{HORIZONTAL ELLIPSIS}{tail[dot + 1 :] if 0 <= dot < most // 4 else tail}"
