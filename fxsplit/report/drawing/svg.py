"""Scenes as SVG: text stays text, and colours are classes, so that a page can change its theme."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape

from fxsplit.report.drawing.scene import Box, Label, Scene, Shape, Stroke
from fxsplit.report.drawing.theme import LIGHT, name_class

SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
PATTERNS = {
    "stripes": '<path d="M0 6L6 0M-1 1L1 -1M5 7L7 5"/>',
    "cross": '<path d="M0 0L6 6M0 6L6 0"/>',
    "dots": '<circle cx="3" cy="3" r="1"/>',
}
"""The tile of each pattern, six pixels wide."""


def write_svg(scene: Scene, theme: Mapping[str, str] | None = LIGHT) -> str:
    """Return a scene as SVG. Without a theme the SVG has no colours, and the page around it must state them."""
    size = f'width="{_round(scene.width)}" height="{_round(scene.height)}"'
    box = f'viewBox="0 0 {_round(scene.width)} {_round(scene.height)}"'
    name = escape(scene.name)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img" aria-labelledby="{name}-title">']
    parts.append(f'<title id="{name}-title">{escape(scene.title)}</title>')
    used = {shape.pattern for shape in scene.shapes if isinstance(shape, Box) and shape.pattern}
    arrows = sorted({s.role for s in scene.shapes if isinstance(s, Stroke) and s.arrow})
    if used or arrows:
        tiles = "".join(_write_pattern(scene.name, kind) for kind in sorted(used))
        parts.append(f"<defs>{tiles}{''.join(_write_arrow(scene.name, role) for role in arrows)}</defs>")
    if theme is not None:
        parts.append(f"<style>{write_css(theme)}</style>")
        parts.append(f'<rect class="fx-paper" width="{_round(scene.width)}" height="{_round(scene.height)}"/>')
    parts += [_write_shape(scene.name, shape) for shape in scene.shapes]
    return "\n".join([*parts, "</svg>\n"])


def write_css(theme: Mapping[str, str]) -> str:
    """Return the rules of all classes that SVG of scenes uses, with the colours of a theme."""
    rules = [f"text{{font-family:{SANS}}}.fx-mono{{font-family:{MONO}}}.fx-bold{{font-weight:600}}"]
    rules.append(".fx-path{fill:none}")
    for role, colour in theme.items():
        kind = name_class(role)
        rules.append(f".{kind}{{fill:{colour}}}.{kind}-s{{stroke:{colour}}}")
    return "".join(rules)


def embed_svg(scene: Scene) -> str:
    """Return a scene as an <img> that holds it: its classes then change nothing in the page of a notebook."""
    data = base64.b64encode(write_svg(scene).encode()).decode()
    return f'<img alt="{escape(scene.title)}" style="max-width: 100%" src="data:image/svg+xml;base64,{data}">'


def _write_shape(name: str, shape: Shape) -> str:
    """Return one shape as an element, and the pattern over it as another."""
    if isinstance(shape, Label):
        return _write_label(shape)
    if isinstance(shape, Stroke):
        return _write_stroke(name, shape)
    place = f'x="{_round(shape.x)}" y="{_round(shape.y)}" width="{_round(shape.width)}" height="{_round(shape.height)}"'
    place += f' rx="{_round(shape.round)}"' * bool(shape.round)
    classes = name_class(shape.fill) + f" {name_class(shape.edge)}-s" * bool(shape.edge)
    dash = ' stroke-dasharray="4 3"' * shape.dashed
    made = _close("rect", f'class="{classes}" {place}{dash}{_write_key(shape.key)}', shape.hint)
    if shape.pattern:
        # The pattern lies over the area, and lets the pointer through to it.
        made += f'<rect {place} fill="url(#{escape(name)}-{shape.pattern})" pointer-events="none"/>'
    return made


def _write_label(label: Label) -> str:
    """Return a line of text."""
    classes = name_class(label.role) + " fx-mono" * label.mono + " fx-bold" * label.bold
    anchor = "" if label.anchor == "start" else f' text-anchor="{label.anchor}"'
    place = f'x="{_round(label.x)}" y="{_round(label.y)}" font-size="{_round(label.size)}"'
    return f'<text class="{classes}" {place}{anchor}>{escape(label.text)}</text>'


def _write_stroke(name: str, stroke: Stroke) -> str:
    """Return a line or a curve."""
    points = [f"{_round(x)} {_round(y)}" for x, y in stroke.points]
    path = f"M{points[0]}C{' '.join(points[1:])}" if stroke.curved else f"M{'L'.join(points)}"
    dash = ' stroke-dasharray="4 3"' * stroke.dashed
    end = f' marker-end="url(#{escape(name)}-{name_class(stroke.role)})"' * stroke.arrow
    looks = f'class="fx-path {name_class(stroke.role)}-s" stroke-width="{_round(stroke.width)}"{dash}{end}'
    return _close("path", f'{looks} d="{path}"{_write_key(stroke.key)}', stroke.hint)


def _close(element: str, attributes: str, hint: str) -> str:
    """Return an element, with its hint if it has one."""
    if not hint:
        return f"<{element} {attributes}/>"
    return f"<{element} {attributes}><title>{escape(hint)}</title></{element}>"


def _write_key(key: str) -> str:
    return f' data-key="{escape(key)}"' if key else ""


def _write_pattern(name: str, kind: str) -> str:
    """Return the definition of a pattern: white lines, half transparent, that suit every colour."""
    head = f'<pattern id="{escape(name)}-{kind}" width="6" height="6" patternUnits="userSpaceOnUse">'
    looks = 'class="fx-hatch-s fx-hatch" stroke-width="1.2" fill-opacity=".75" stroke-opacity=".75"'
    return f"{head}<g {looks}>{PATTERNS[kind]}</g></pattern>"


def _write_arrow(name: str, role: str) -> str:
    """Return the definition of the head of arrows in a colour."""
    kind = name_class(role)
    size = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" markerUnits="userSpaceOnUse"'
    return f'<marker id="{escape(name)}-{kind}" {size} orient="auto"><path class="{kind}" d="M0 0L8 4L0 8z"/></marker>'


def _round(number: float) -> str:
    """Return a length with at most one decimal, as short as possible."""
    return f"{number:.1f}".removesuffix(".0")
