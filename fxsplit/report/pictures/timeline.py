"""Timelines as a picture, one above the other on one scale, for example predicted above measured.

A timeline has a row for each device and link, and a block with its microbatch for each action. The memory of each
device is below. Its *bubble* is the share of the time in which devices are idle.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import floor, inf, log10

from fxsplit.report.drawing.scene import SMALL, Box, Label, Pattern, Scene, Stroke, fit, measure
from fxsplit.schedule.action import NAMES, SENDS, Action
from fxsplit.schedule.simulation.memory import find_peak
from fxsplit.schedule.simulation.timeline import Timeline
from fxsplit.system.figures import format_bytes, format_ms, format_share

COLOURS = {"F": "F", "B": "B", "I": "I", "W": "W"}
PATTERNS: dict[str, Pattern] = {"I": "stripes", "W": "cross", "SEND_B": "stripes"}
"""Patterns distinguish the halves of a backward from a whole backward, even without colours."""
NAMED, ROW, BAR, LINK, LINK_BAR, MEMORY, MARGIN = 168.0, 30.0, 20.0, 18.0, 11.0, 44.0, 12.0
WIDTH = 860.0
TITLE, AXIS = 26.0, 22.0
MOST_NUMBERS = 1500
"""The numbers of microbatches are left out of a picture with more blocks."""
MOST_LINKS = 1500
"""The rows of links are left out of a picture with more messages."""


def draw_timelines(
    timelines: Sequence[Timeline],
    *,
    memory: bool = False,
    limits: Sequence[float] = (),
    path: Collection[tuple[int, int]] = (),
    keyed: bool = False,
) -> Scene:
    """Return timelines as a picture.

    - `memory` draws the memory of each device below, in bytes, with its limit in `limits`
    - `path` are actions of the first timeline to draw with a border, as (device, place in its row): the critical path
    - `keyed` gives each block the key "span" with the numbers of its timeline, row and place, for a page
    """
    longest = max((t.length_ms for t in timelines), default=0.0)
    scale = WIDTH / longest if longest else 0.0
    title = "; ".join(title_timeline(t) for t in timelines) or "no timeline"
    scene = Scene("timeline", title, NAMED + WIDTH + 2 * MARGIN, MARGIN)
    for number, timeline in enumerate(timelines):
        _draw_rows(scene, timeline, scale, number if keyed else -1, set() if number else set(path))
        if memory and timeline.memory:
            _draw_memory(scene, timeline, scale, limits)
        scene.height += 12
    _draw_axis(scene, longest, scale)
    _draw_legend(scene, timelines, has_path=bool(path))
    return scene


def title_timeline(timeline: Timeline) -> str:
    """Return the name of a timeline, its length, and its bubble."""
    idle = f", bubble {format_share(timeline.bubble)}" if timeline.devices else ""
    return f"{timeline.title}: step {format_ms(timeline.length_ms)}{idle}"


def _draw_rows(scene: Scene, timeline: Timeline, scale: float, number: int, path: set[tuple[int, int]]) -> None:
    """Draw the title, the devices and the links of a timeline below the last one."""
    scene.add(Label(MARGIN, scene.height + 13, title_timeline(timeline), "ink", 13.0, bold=True))
    scene.height += TITLE
    numbered = sum(map(len, timeline.spans)) <= MOST_NUMBERS
    for device, (label, (_, spans)) in enumerate(zip(timeline.labels, timeline.rows, strict=True)):
        is_link = device >= len(timeline.devices)
        if is_link and sum(len(own) for _, own in timeline.links) > MOST_LINKS:
            break
        top, bar = scene.height, LINK_BAR if is_link else BAR
        _name_row(scene, label, top, is_link=is_link)
        scene.add(Box(MARGIN + NAMED, top, timeline.length_ms * scale, bar, "faint"))
        stages = sorted({span.action.stage for span in spans})
        for place, (action, begin_ms, end_ms) in enumerate(spans):
            left, width = MARGIN + NAMED + begin_ms * scale, (end_ms - begin_ms) * scale
            role = COLOURS.get(action.op, "other")
            on_path = (device, place) in path and not is_link
            edge = "ink" if on_path else "paper"
            # Of two stages on a device, the blocks of the later one are lower.
            drop = min(6.0, 3.0 * stages.index(action.stage)) if not is_link else 0.0
            key = f"span {number} {device} {place}" if number >= 0 else ""
            scene.add(
                Box(left, top + drop, max(width, 0.3), bar - drop, role, edge, PATTERNS.get(action.op, ""), key=key)
            )
            if numbered and action.microbatch >= 0 and not is_link:
                text = str(action.microbatch)
                if width > measure(text, SMALL) + 3:
                    colour = "on light" if action.op in ("W", "I") else "on dark"
                    scene.add(Label(left + width / 2, top + BAR - 6, text, colour, SMALL, "middle", bold=on_path))
        scene.height += LINK if is_link else ROW


def _name_row(scene: Scene, label: str, top: float, *, is_link: bool) -> None:
    """Write the name of a device with its part of the model below, or of a link."""
    name, _, place = label.partition("\n")
    room = NAMED - 8
    if is_link:
        scene.add(Label(MARGIN, top + 9, fit(name, room, SMALL, mono=True), "muted", SMALL, mono=True))
        return
    scene.add(Label(MARGIN, top + 9, fit(name, room, 11.0, mono=True), "ink", 11.0, mono=True))
    if place:
        scene.add(Label(MARGIN, top + 21, fit(place, room, 9.0, mono=True), "muted", 9.0, mono=True))


def _draw_memory(scene: Scene, timeline: Timeline, scale: float, limits: Sequence[float]) -> None:
    """Draw the memory of each device over time, on one scale, and its limit if that is near."""
    # Some timelines have the memory of only some devices.
    peaks = [find_peak(trace) for trace in timeline.memory]
    near = [limit for limit in limits if limit < 5 * max(peaks)]
    most = max([*peaks, *near]) or 1.0
    scene.add(Label(MARGIN, scene.height + 13, "memory of each device", "ink", bold=True))
    scene.height += TITLE
    for device, (name, trace) in enumerate(zip(timeline.devices, timeline.memory, strict=False)):
        top, bottom = scene.height, scene.height + MEMORY
        limit = limits[device] if device < len(limits) else inf
        of = f" of {format_bytes(limit)}" if limit < inf else ""
        scene.add(
            Label(MARGIN, top + 14, fit(name, NAMED - 8, 11.0, mono=True), "ink", 11.0, mono=True),
            Label(MARGIN, top + 29, f"at most {format_bytes(peaks[device])}{of}", "muted", SMALL),
            Box(MARGIN + NAMED, top, timeline.length_ms * scale, MEMORY, "faint"),
        )
        for (begin_ms, bytes_), (end_ms, _) in zip(trace, [*trace[1:], (timeline.length_ms, 0.0)], strict=True):
            height = MEMORY * bytes_ / most
            left, width = MARGIN + NAMED + begin_ms * scale, (end_ms - begin_ms) * scale
            if width > 0:
                hint = f"{name}: {format_bytes(bytes_)} from {format_ms(begin_ms)}" if len(trace) < 400 else ""
                scene.add(Box(left, bottom - height, width, height, "activations", hint=hint))
        if limit <= most:
            y = bottom - MEMORY * limit / most
            scene.add(Stroke([(MARGIN + NAMED, y), (MARGIN + NAMED + timeline.length_ms * scale, y)], "alarm", 1.5))
        scene.height += MEMORY + 8


def _draw_axis(scene: Scene, longest: float, scale: float) -> None:
    """Draw the axis of time in ms."""
    y = scene.height
    scene.add(Stroke([(MARGIN + NAMED, y), (MARGIN + NAMED + WIDTH, y)], "line"))
    for tick in list_ticks(longest):
        x = MARGIN + NAMED + tick * scale
        scene.add(Stroke([(x, y), (x, y + 4)], "line"), Label(x, y + 16, f"{tick:g}", "muted", SMALL, "middle"))
    scene.add(Label(MARGIN + NAMED - 8, y + 16, "ms", "muted", SMALL, "end"))
    scene.height += AXIS


def list_ticks(longest: float, most: int = 10) -> list[float]:
    """Return at most about `most` round numbers from 0 to `longest`, evenly spaced."""
    if longest <= 0:
        return [0.0]
    step = 10.0 ** floor(log10(longest / most))
    step *= next(factor for factor in (1, 2, 5, 10) if longest / (factor * step) <= most)
    return [round(i * step, 12) for i in range(int(longest / step + 1e-9) + 1)]


def _draw_legend(scene: Scene, timelines: Sequence[Timeline], *, has_path: bool) -> None:
    """Name the kinds of actions, in the order of their first appearance."""
    seen: dict[str, Action] = {}
    for timeline in timelines:
        for _, spans in timeline.rows:
            for span in spans:
                seen.setdefault((NAMES | SENDS).get(span.action.op, span.action.op.lower()), span.action)
    x, y = MARGIN + NAMED, scene.height + 4
    entries = [
        (name, Box(0, 0, 14, 10, COLOURS.get(a.op, "other"), "line", PATTERNS.get(a.op, "")))
        for name, a in seen.items()
    ]
    entries += [("idle", Box(0, 0, 14, 10, "faint", "line"))] if seen else []
    entries += [("critical path", Box(0, 0, 14, 10, "none", "ink"))] if has_path else []
    for name, box in entries:
        scene.add(
            Box(x, y, box.width, box.height, box.fill, box.edge, box.pattern), Label(x + 18, y + 9, name, "ink", 11.0)
        )
        x += measure(name, 11.0) + 34
    scene.height += 24
