"""Bars: the load of each stage in parts with the lower bound, and its memory by kind with its limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import StagePlan
from fxsplit.report.drawing.scene import SMALL, Box, Label, Pattern, Scene, Stroke, fit, measure
from fxsplit.report.drawing.theme import edge_of
from fxsplit.system.figures import format_bytes, format_ms, format_share

ROW, BAR, NAMES, WIDTH, FIGURES, MARGIN = 30.0, 18.0, 140.0, 460.0, 200.0, 12.0


@dataclass(frozen=True)
class Part:
    """A kind of time or memory: its name, its colour, and the pattern that distinguishes it without colours.

    `role` names the colour, and `light` says that text on this colour must be dark.
    """

    name: str
    role: str
    pattern: Pattern = ""
    light: bool = False


LOADS = (
    Part("forward", "F"),
    Part("recompute", "F", "stripes"),
    Part("backward", "B"),
    Part("weight gradient", "W", light=True),
    Part("receive", "receive", "stripes"),
    Part("send", "send", "dots", light=True),
    Part("sum of replicas", "reduce", "cross"),
)
MEMORY = (
    Part("parameters", "parameters"),
    Part("gradients", "gradients", "stripes"),
    Part("optimizer", "optimizer"),
    Part("buffers", "buffers", "dots"),
    Part("activations", "activations"),
    Part("recompute", "recompute", "stripes"),
    Part("boundaries", "boundaries", "dots", light=True),
    Part("working", "working", light=True),
)


def split_load(stage: StagePlan, plan: Plan) -> dict[str, float]:
    """Return the parts of a stage's load in ms, which add up to the time in which its device is busy.

    If transfers overlap with computing, they are no part of it.
    """
    again = stage.forward_ms if stage.recompute else 0.0
    parts = {
        "forward": stage.forward_ms,
        "recompute": again,
        "backward": stage.backward_ms - again - stage.weight_ms,
        "weight gradient": stage.weight_ms,
        "sum of replicas": stage.reduce_ms,
    }
    if plan.model.name != "overlapped":
        parts |= {"receive": stage.receive_ms, "send": stage.send_ms}
    return {part.name: parts[part.name] for part in LOADS if parts.get(part.name, 0.0) > 0}


def draw_loads(plan: Plan) -> Scene:
    """Return the load of each stage in parts, with the slowest stage and the lower bound as lines."""
    most = max(plan.bottleneck_ms, plan.lower_bound_ms) or 1.0
    title = f"Time of each stage for a microbatch; the slowest takes {format_ms(plan.bottleneck_ms)}, {plan.standing}"
    scene = _begin("loads", title, "time of each stage for a microbatch")
    top = 44.0
    for number, stage in enumerate(plan.stages):
        note = f"{format_ms(stage.load_ms)}" + (
            ", the slowest"
            if stage.load_ms == plan.bottleneck_ms
            else f", {format_share(1.0 - stage.load_ms / most)} less"
        )
        _draw_row(scene, plan, number, top, split_load(stage, plan), _Scale(LOADS, most, format_ms), note)
        left = NAMES + MARGIN + WIDTH * stage.load_ms / most
        if stage.load_ms < plan.bottleneck_ms:
            scene.add(Box(left, top, MARGIN + NAMES + WIDTH - left, BAR, "none", edge="line", dashed=True))
        top += ROW
    bottom = top - ROW + BAR + 6
    scene.height = bottom + 22
    if plan.bottleneck_ms:
        _draw_line(scene, plan.bottleneck_ms / most, 38.0, bottom, "alarm")
    if plan.standing != "not proven" and plan.lower_bound_ms:
        at = plan.lower_bound_ms / most
        _draw_line(scene, at, 38.0, bottom, "bound", dashed=True)
        text = f"lower bound {format_ms(plan.lower_bound_ms)}, {plan.standing}"
        scene.add(Label(MARGIN + NAMES + WIDTH * at, bottom + 13, text, "bound", 11.0, "end"))
    elif plan.bottleneck_ms:
        scene.add(Label(MARGIN + NAMES + WIDTH, bottom + 13, "not proven to be the best", "muted", 11.0, "end"))
    _draw_legend(scene, [part for part in LOADS if any(part.name in split_load(s, plan) for s in plan.stages)])
    return scene


def draw_memory(plan: Plan, limits: Sequence[float]) -> Scene:
    """Return the memory of each stage by kind, in the fullest moment, with the limit of its device if it has one."""
    needed = max((stage.memory_bytes for stage in plan.stages), default=0.0)
    finite = [limit for limit in limits if limit < inf]
    # A limit far above all that is needed would make the bars invisible.
    most = max([needed, *(limit for limit in finite if limit < 5 * needed)]) or 1.0
    title = f"Memory of each stage at most; the fullest needs {format_bytes(needed)}"
    scene = _begin("memory", title, "memory of each stage in its fullest moment")
    top = 44.0
    for number, stage in enumerate(plan.stages):
        limit = limits[number] if number < len(limits) else inf
        of = (
            f" of {format_bytes(limit)}, {format_share(stage.memory_bytes / limit)}"
            if limit < inf
            else ", limit not known"
        )
        kinds = {kind: size for kind, size in stage.memory_kinds.items() if size > 0}
        note = format_bytes(stage.memory_bytes) + of
        _draw_row(scene, plan, number, top, kinds, _Scale(MEMORY, most, format_bytes), note)
        if limit <= most:
            _draw_line(scene, limit / most, top - 4, top + BAR + 4, "alarm")
        top += ROW
    scene.height = top + 2
    _draw_legend(scene, [part for part in MEMORY if any(s.memory_kinds.get(part.name, 0.0) > 0 for s in plan.stages)])
    return scene


def _begin(name: str, title: str, shown: str) -> Scene:
    scene = Scene(name, title, 2 * MARGIN + NAMES + WIDTH + FIGURES, 0.0)
    scene.add(Label(MARGIN, 18, shown, "ink", 13.0, bold=True))
    return scene


@dataclass(frozen=True)
class _Scale:
    """The kinds of parts in a bar, the amount that a bar of full width shows, and the function that formats amounts."""

    kinds: Sequence[Part]
    most: float
    shown: Callable[[float], str]


def _draw_row(
    scene: Scene, plan: Plan, number: int, top: float, sizes: Mapping[str, float], scale: _Scale, note: str
) -> None:
    """Draw the bar of a stage in parts, with its name on the left and a note on the right."""
    stage = plan.stages[number]
    names = "+".join(plan.device_names[d] for d in stage.devices)
    base = top + BAR - 5
    scene.add(
        Label(MARGIN, base, f"stage {number}", edge_of(number), bold=True),
        Label(MARGIN + 64, base, fit(names, NAMES - 68, 11.0, mono=True), "ink", 11.0, mono=True),
        Label(MARGIN + NAMES + WIDTH + 8, base, fit(note, FIGURES, 11.0), "ink", 11.0),
    )
    x = MARGIN + NAMES
    for part in scale.kinds:
        size = sizes.get(part.name, 0.0)
        if not size:
            continue
        width = WIDTH * size / scale.most
        hint = f"stage {number}, {part.name}: {scale.shown(size)}"
        scene.add(Box(x, top, width, BAR, part.role, edge="paper", pattern=part.pattern, hint=hint))
        if width > measure(part.name, SMALL) + 6 and not part.pattern:
            colour = "on light" if part.light else "on dark"
            scene.add(Label(x + width / 2, base, part.name, colour, SMALL, "middle"))
        x += width


def _draw_line(scene: Scene, share: float, top: float, bottom: float, role: str, *, dashed: bool = False) -> None:
    x = MARGIN + NAMES + WIDTH * share
    scene.add(Stroke([(x, top), (x, bottom)], role, 1.6, dashed=dashed))


def _draw_legend(scene: Scene, parts: Sequence[Part]) -> None:
    """Name the kinds of parts, in the order in which bars have them."""
    x, y = MARGIN, scene.height + 4
    for part in parts:
        width = measure(part.name, 11.0) + 30
        if x + width > scene.width - MARGIN:
            x, y = MARGIN, y + 17
        scene.add(
            Box(x, y, 14, 10, part.role, edge="line", pattern=part.pattern),
            Label(x + 18, y + 9, part.name, "ink", 11.0),
        )
        x += width
    scene.height = y + 20
