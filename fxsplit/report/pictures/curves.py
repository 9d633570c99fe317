"""Curves: the speed-up of plans over the number of devices, with the bound that no plan can exceed.

The *knee* is the first number of devices after which no more devices make the pipeline faster by a share of GAIN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from fxsplit.ir.facts.plan import Plan
from fxsplit.report.drawing.scene import SMALL, Box, Label, Scene, Stroke
from fxsplit.report.pictures.timeline import list_ticks
from fxsplit.system.figures import format_count

LEFT, TOP, WIDTH, HEIGHT, RIGHT, BOTTOM = 60.0, 64.0, 560.0, 300.0, 110.0, 70.0
DOT = 6.0
_Place = Callable[[float, float], tuple[float, float]]
GAIN = 0.05
"""Any number of devices above the knee makes the pipeline faster by less than this share."""


def find_knee(plans: Sequence[tuple[int, Plan]]) -> int:
    """Return the first number of devices after which no larger number makes the pipeline faster by GAIN or more."""
    for count, plan in plans:
        later = [other.speedup for n, other in plans if n > count]
        if all(speedup < plan.speedup * (1.0 + GAIN) for speedup in later):
            return count
    return plans[-1][0]


def bound_speedup(plan: Plan) -> float:
    """Return the speed-up that no plan for as many devices can exceed; infinite if that is not proven."""
    proven = plan.proof is not None and plan.lower_bound_ms > 0
    return plan.single_ms / plan.lower_bound_ms if proven else inf


def draw_devices(plans: Sequence[tuple[int, Plan]]) -> Scene:
    """Return the speed-up of each plan over its number of devices, with its bound, the ideal and the knee."""
    knee = find_knee(plans)
    best = next(plan for count, plan in plans if count == knee)
    title = f"more than {format_count(knee, 'device')} gain less than {100 * GAIN:.0f} %: speed-up {best.speedup:.2f}"
    scene = Scene("devices", title, LEFT + WIDTH + RIGHT, TOP + HEIGHT + BOTTOM)
    scene.add(Label(12, 24, "Speed-up over one device", "ink", 15.0, bold=True), Label(12, 44, title, "ink"))
    first, last = plans[0][0], plans[-1][0]
    bounds = [(n, bound_speedup(plan)) for n, plan in plans if bound_speedup(plan) < inf]
    most = max([1.0, *(plan.speedup for _, plan in plans if plan.speedup < inf), *(b for _, b in bounds)]) * 1.05

    def place(count: float, speedup: float) -> tuple[float, float]:
        return LEFT + WIDTH * (count - first) / max(1, last - first), TOP + HEIGHT * (1.0 - min(speedup, most) / most)

    _draw_axes(scene, plans, most, place)
    ideal = min(float(last), most)
    scene.add(Stroke([place(first, first), place(ideal, ideal)], "line", dashed=True))
    scene.add(Label(*place(ideal, ideal), " as many times as devices", "muted", SMALL))
    if len(bounds) > 1:
        scene.add(Stroke([place(*point) for point in bounds], "bound", 1.4, dashed=True))
    scene.add(Stroke([place(n, plan.speedup) for n, plan in plans], "edge 0", 2.2))
    for count, plan in plans:
        x, y = place(count, plan.speedup)
        hint = f"{format_count(count, 'device')}: speed-up {plan.speedup:.2f}, {plan.standing}"
        scene.add(Box(x - DOT / 2, y - DOT / 2, DOT, DOT, "edge 0", round=DOT / 2, hint=hint))
    x, y = place(knee, best.speedup)
    scene.add(Box(x - DOT, y - DOT, 2 * DOT, 2 * DOT, "none", edge="alarm", round=DOT))
    scene.add(Label(x + 8, y + 20, f"knee: {format_count(knee, 'device')}", "alarm", 11.0, bold=True))
    _draw_legend(scene, proven=all(plan.optimal for _, plan in plans), has_bound=len(bounds) > 1)
    return scene


def _draw_axes(scene: Scene, plans: Sequence[tuple[int, Plan]], most: float, place: _Place) -> None:
    """Draw the two axes with their numbers."""
    for tick in list_ticks(most, 6):
        y = place(plans[0][0], tick)[1]
        scene.add(Stroke([(LEFT, y), (LEFT + WIDTH, y)], "faint"))
        scene.add(Label(LEFT - 8, y + 4, f"{tick:g}", "muted", 11.0, "end"))
    every = max(1, len(plans) // 16)
    for count, _ in plans[::every]:
        x = place(count, 0.0)[0]
        scene.add(Label(x, TOP + HEIGHT + 18, str(count), "muted", 11.0, "middle"))
    scene.add(Stroke([(LEFT, TOP + HEIGHT), (LEFT + WIDTH, TOP + HEIGHT)], "line"))
    scene.add(Label(LEFT + WIDTH / 2, TOP + HEIGHT + 36, "devices", "muted", 11.0, "middle"))


def _draw_legend(scene: Scene, *, proven: bool, has_bound: bool) -> None:
    """Name the two curves."""
    y = TOP + HEIGHT + 56
    scene.add(Stroke([(LEFT, y), (LEFT + 22, y)], "edge 0", 2.2))
    scene.add(Label(LEFT + 28, y + 4, "planned, each proven optimal" if proven else "planned", "ink", 11.0))
    if has_bound and not proven:
        scene.add(Stroke([(LEFT + 220, y), (LEFT + 242, y)], "bound", 1.4, dashed=True))
        scene.add(Label(LEFT + 248, y + 4, "no plan is faster than this", "ink", 11.0))
