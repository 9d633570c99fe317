"""Scenes as files: SVG is written here, and matplotlib draws PNG and PDF."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxsplit.errors import InputError
from fxsplit.report.drawing.scene import Box, Label, Scene, Stroke
from fxsplit.report.drawing.svg import write_svg
from fxsplit.report.drawing.theme import DARK, LIGHT
from fxsplit.system.files import write_whole

KINDS = (".svg", ".png", ".pdf")
DPI, POINTS = 96.0, 72.0
SHARP = 2.0
"""The pixels of a PNG for each pixel of a scene, so that it is sharp on fine screens."""
HATCHES = {"stripes": "////", "cross": "xxxx", "dots": "..."}


def check_kind(path: str | os.PathLike[str]) -> None:
    """Raise InputError unless a picture can be written to a path: by its ending, and with matplotlib for PNG and PDF.

    Check this before a long search.
    """
    kind = Path(path).suffix
    if kind not in KINDS:
        raise InputError(f"cannot draw {os.fspath(path)!r}: end its name in {', '.join(KINDS)}")
    if kind != ".svg":
        _load_matplotlib()


def save_scene(scene: Scene, path: str | os.PathLike[str], *, dark: bool = False) -> None:
    """Write a scene as .svg, .png or .pdf, on light or on dark paper.

    Raises InputError for another ending, and for PNG and PDF without matplotlib; FileError if writing fails. An
    existing file is then unchanged.
    """
    check_kind(path)
    theme, kind = DARK if dark else LIGHT, Path(path).suffix
    write_whole(path, write_svg(scene, theme) if kind == ".svg" else _paint(scene, theme, kind[1:]))


def _load_matplotlib() -> Any:
    """Return matplotlib's class of figures. Raises InputError if it is not installed."""
    try:
        from matplotlib.figure import Figure  # takes a second to import, and only these pictures need it
    except ImportError as error:
        raise InputError("PNG and PDF need matplotlib: pip install 'fxsplit[picture]', or write .svg") from error
    return Figure


def _paint(scene: Scene, theme: Mapping[str, str], kind: str) -> bytes:
    """Return a scene as an image of this kind."""
    figure = _load_matplotlib()(figsize=(scene.width / DPI, scene.height / DPI), facecolor=theme["paper"])
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0.0, scene.width)
    axes.set_ylim(scene.height, 0.0)
    axes.axis("off")
    for shape in scene.shapes:
        if isinstance(shape, Box):
            _paint_box(axes, shape, theme)
        elif isinstance(shape, Stroke):
            _paint_stroke(axes, shape, theme)
        else:
            _paint_label(axes, shape, theme)
    # Draw in memory first: on a full disk matplotlib would leave half a picture.
    image = io.BytesIO()
    figure.savefig(image, dpi=SHARP * DPI, format=kind, facecolor=theme["paper"])
    return image.getvalue()


def _paint_box(axes: Any, box: Box, theme: Mapping[str, str]) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    edge = theme[box.edge] if box.edge else "none"
    dash = {"linestyle": (0, (4, 3))} if box.dashed else {}
    looks: dict[str, Any] = {"facecolor": theme[box.fill], "edgecolor": edge, "linewidth": _points(1.0), **dash}
    if box.round:
        style = f"round,pad=0,rounding_size={box.round}"
        axes.add_patch(FancyBboxPatch((box.x, box.y), box.width, box.height, boxstyle=style, **looks))
    else:
        axes.add_patch(Rectangle((box.x, box.y), box.width, box.height, **looks))
    if box.pattern:
        # matplotlib draws a pattern in the colour of the border.
        hatch: dict[str, Any] = {
            "hatch": HATCHES[box.pattern],
            "edgecolor": theme["hatch"],
            "linewidth": 0.0,
            "alpha": 0.75,
        }
        axes.add_patch(Rectangle((box.x, box.y), box.width, box.height, facecolor="none", **hatch))


def _paint_stroke(axes: Any, stroke: Stroke, theme: Mapping[str, str]) -> None:
    from matplotlib.patches import FancyArrowPatch, PathPatch
    from matplotlib.path import Path as Curve

    moves = [Curve.CURVE4 if stroke.curved else Curve.LINETO] * (len(stroke.points) - 1)
    curve = Curve(list(stroke.points), [Curve.MOVETO, *moves])
    looks: dict[str, Any] = {"edgecolor": theme[stroke.role], "linewidth": _points(stroke.width)}
    looks |= {"linestyle": (0, (4, 3))} if stroke.dashed else {}
    if stroke.arrow:
        head = f"-|>,head_length={_points(5.0) / 10},head_width={_points(3.0) / 10}"
        axes.add_patch(
            FancyArrowPatch(path=curve, arrowstyle=head, mutation_scale=10, facecolor=theme[stroke.role], **looks)
        )
    else:
        axes.add_patch(PathPatch(curve, facecolor="none", **looks))


def _paint_label(axes: Any, label: Label, theme: Mapping[str, str]) -> None:
    align = {"start": "left", "middle": "center", "end": "right"}[label.anchor]
    axes.text(
        label.x,
        label.y,
        # A dollar sign would begin a formula.
        label.text.replace("$", r"\$"),
        color=theme[label.role],
        # DejaVu Sans, matplotlib's own font, is wider than the fonts of browsers.
        fontsize=_points(label.size) * (1.0 if label.mono else 0.93),
        ha=align,
        va="baseline",
        family="monospace" if label.mono else "sans-serif",
        weight="bold" if label.bold else "normal",
    )


def _points(pixels: float) -> float:
    """Return a length in points."""
    return pixels * POINTS / DPI
