"""The places where a graph can be cut: the work before each, the bytes that cross it, and the cuts of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log10
from typing import Protocol

from fxsplit.ir.facts.plan import Plan
from fxsplit.report.drawing.scene import SMALL, Box, Label, Scene, Stroke
from fxsplit.report.drawing.theme import edge_of
from fxsplit.report.graph.cuts import list_cuts
from fxsplit.system.figures import format_bytes, format_share

LEFT, TOP, WIDTH, HEIGHT, RIGHT, BOTTOM = 84.0, 40.0, 720.0, 260.0, 24.0, 48.0


LINES, MANY = 8, 100
"""How many grid lines there are at most, and from how many places on the dots are small."""


class Places(Protocol):
    """Places for a cut: shares of the work before them, and the bytes that cross them."""

    @property
    def shares(self) -> Sequence[float]:
        """The share of the work before each place, from 0 to 1."""

    @property
    def sent_bytes(self) -> Sequence[float]:
        """The bytes that cross each place, forward and back."""

    @property
    def n_places(self) -> int:
        """The number of all places, also the ones that are left out."""


def draw_places(places: Places, plan: Plan) -> Scene:
    """Return places for a cut as dots, and the cuts of a plan, which must know its costs, as numbered circles."""
    shown = len(places.shares)
    several = f", those with the fewest bytes of {places.n_places - 2:,}" if places.n_places > shown + 2 else ""
    title = f"{shown:,} places where the graph can be cut{several}, and the cuts of this plan"
    scene = Scene("places", title, LEFT + WIDTH + RIGHT, TOP + HEIGHT + BOTTOM)
    scene.add(Label(12, 20, title, "ink", 13.0, bold=True))
    chosen = _find_chosen(plan)
    sizes = [size for size in (*places.sent_bytes, *(size for _, _, size in chosen)) if size > 0]
    low, high = (min(sizes), max(sizes)) if sizes else (1.0, 1.0)
    # Sizes differ by factors, so the height is logarithmic.
    first, span = log10(low), max(log10(high) - log10(low), 0.3)

    def place(share: float, size: float) -> tuple[float, float]:
        up = (log10(size) - first) / span if size > 0 else 0.0
        return LEFT + WIDTH * share, TOP + HEIGHT * (1.0 - 0.92 * up) - 8.0

    _draw_axes(scene, low, high, place)
    dot = 2.0 if shown > MANY else 3.5
    for share, size in zip(places.shares, places.sent_bytes, strict=True):
        x, y = place(share, size)
        hint = f"{format_share(share)} of the work before, {format_bytes(size)} cross" if shown <= 400 else ""
        scene.add(Box(x - dot, y - dot, 2 * dot, 2 * dot, "muted", round=dot, hint=hint))
    for number, share, size in chosen:
        x, y = place(share, size)
        hint = f"cut {number}: {format_share(share)} of the work before, {format_bytes(size)} cross"
        scene.add(
            Stroke([(x, TOP), (x, TOP + HEIGHT)], edge_of(number), 1.2, dashed=True),
            Box(x - 9, y - 9, 18, 18, "paper", edge="ink", round=9.0, hint=hint),
            Label(x, y + 4, str(number), "ink", 11.0, "middle", bold=True),
        )
    return scene


def _find_chosen(plan: Plan) -> list[tuple[int, float, float]]:
    """Return the number of each cut of a plan, the share of the work before it, and the bytes that cross it."""
    if plan.costs is None:
        return []
    work = [
        sum(plan.costs.by_name[n].forward_ms + plan.costs.by_name[n].backward_ms for n in s.nodes) for s in plan.stages
    ]
    total = sum(work) or 1.0
    return [(cut.number, sum(work[: cut.number]) / total, cut.both_bytes) for cut in list_cuts(plan, plan.costs)]


def _draw_axes(scene: Scene, low: float, high: float, place: Callable[[float, float], tuple[float, float]]) -> None:
    """Draw the axes: the work before the cut in percent, and the bytes by factors."""
    for percent in range(0, 101, 20):
        x = LEFT + WIDTH * percent / 100
        scene.add(
            Stroke([(x, TOP), (x, TOP + HEIGHT)], "faint"),
            Label(x, TOP + HEIGHT + 16, f"{percent} %", "muted", SMALL, "middle"),
        )
    # Lines at powers of one factor, and not more than about eight of them.
    factor = next((f for f in (2.0, 4.0, 32.0, 1024.0) if f**LINES >= high / max(low, 1e-9)), 1024.0)
    size = 1.0
    while size <= high:
        if size >= low:
            y = place(0.0, size)[1]
            scene.add(Stroke([(LEFT, y), (LEFT + WIDTH, y)], "faint"))
            scene.add(Label(LEFT - 6, y + 4, format_bytes(size), "muted", SMALL, "end"))
        size *= factor
    scene.add(Stroke([(LEFT, TOP), (LEFT, TOP + HEIGHT), (LEFT + WIDTH, TOP + HEIGHT)], "line"))
    below = "share of the computing that lies before the cut; the height is the bytes that cross it, forward and back"
    scene.add(Label(LEFT + WIDTH / 2, TOP + HEIGHT + 36, below, "muted", 11.0, "middle"))
