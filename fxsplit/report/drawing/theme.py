"""Themes: the colour of each role of a picture, on light and on dark paper."""

from __future__ import annotations

from collections.abc import Mapping

N_HUES = 8
"""The number of hues of stages. Stage 8 has the hue of stage 0 again."""

_LIGHT_TINTS = ("#dbe7f5", "#fde5c8", "#d6efdc", "#f6d9e3", "#e6def5", "#f5eebb", "#d3eeee", "#e8e2da")
_LIGHT_STRONG = ("#2f6fb3", "#b3650a", "#2a7d4f", "#b83a63", "#7250b8", "#7d6e00", "#14746f", "#6f5c4a")
_DARK_TINTS = ("#1d3350", "#4a3113", "#183b27", "#4a1d2c", "#33254f", "#3f3a0c", "#103b3b", "#38312a")
_DARK_STRONG = ("#7fb2ea", "#f2b05e", "#6fce97", "#f08bae", "#b79cf2", "#d9c94f", "#5fcac8", "#c4b09a")

# The colours of operations and of kinds of memory are the same on both papers: they are areas, and no text.
_AREAS = {
    "F": "#4c78a8",
    "B": "#54a24b",
    "I": "#72b7b2",
    "W": "#eeca3b",
    "other": "#b279a2",
    "receive": "#b279a2",
    "send": "#dcb0d0",
    "reduce": "#9d755d",
    "parameters": "#35507f",
    "gradients": "#665191",
    "optimizer": "#9a4f92",
    "buffers": "#c54d83",
    "activations": "#ee6a5f",
    "recompute": "#ee6a5f",
    "boundaries": "#fa9f50",
    "working": "#fdd08a",
    "hatch": "#ffffff",
    "on dark": "#ffffff",
    "on light": "#15181d",
}
_LIGHT = {
    "paper": "#ffffff",
    "ink": "#1a1d21",
    "muted": "#59616d",
    "line": "#b9c0ca",
    "faint": "#eff2f5",
    "alarm": "#b3261e",
    "bound": "#1b6e3c",
    "none": "none",
}
_DARK = {
    "paper": "#14171c",
    "ink": "#e8eaed",
    "muted": "#a5adba",
    "line": "#4a5261",
    "faint": "#20252d",
    "alarm": "#ff8a80",
    "bound": "#7bd88f",
    "none": "none",
}


def _join(base: Mapping[str, str], tints: tuple[str, ...], strong: tuple[str, ...]) -> dict[str, str]:
    """Return a theme: its own colours, the colours of areas, and two for each hue of stages."""
    stages = {f"stage {i}": tint for i, tint in enumerate(tints)} | {f"edge {i}": dark for i, dark in enumerate(strong)}
    return {**base, **_AREAS, **stages}


LIGHT = _join(_LIGHT, _LIGHT_TINTS, _LIGHT_STRONG)
DARK = _join(_DARK, _DARK_TINTS, _DARK_STRONG)


def fill_of(stage: int) -> str:
    """Return the role of the area of a stage."""
    return f"stage {stage % N_HUES}"


def edge_of(stage: int) -> str:
    """Return the role of the border of a stage, and of text in its colour."""
    return f"edge {stage % N_HUES}"


def name_class(role: str) -> str:
    """Return the class of a role in SVG and CSS, such as `fx-stage-2`."""
    return f"fx-{role.replace(' ', '-')}"
