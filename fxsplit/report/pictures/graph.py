"""The graph of a plan as a picture: a column for each stage, a box for each module in it, and the values over cuts.

stage 0            cut 1              stage 1
[ conv1   ]        1.0 MiB            [ layer3 ]
[ layer1  ] ------------------------> [ layer4 ]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import StagePlan
from fxsplit.report.drawing.scene import SMALL, Box, Label, Scene, Stroke, fit, measure
from fxsplit.report.drawing.theme import edge_of, fill_of
from fxsplit.report.graph.cuts import Cut, list_cuts
from fxsplit.report.graph.fold import Arc, Fold, FoldedGraph, fold_graph
from fxsplit.system.figures import format_bytes, format_count, format_ms

COLUMN, GAP, HEAD = 212.0, 140.0, 74.0
BOX, SPACE, MARGIN, INSET = 38.0, 10.0, 12.0, 10.0
LANE = 14.0
"""The height of a lane below the columns, for values that pass stages."""
MOST, MOST_IN_LONG, LONG = 10, 6, 5
"""The most boxes of a column: MOST, or MOST_IN_LONG if there are more than LONG stages, in several rows of columns."""
MOST_SKIPS, MOST_LANES = 8, 6
"""The most arcs drawn that pass other boxes of their column, and the most that pass whole stages."""
MONO = 11.0


@dataclass(frozen=True)
class _Place:
    """The top left corner of a box. Arcs begin at its `right` and end at its `left`."""

    x: float
    y: float

    @property
    def left(self) -> tuple[float, float]:
        return self.x, self.y + BOX / 2

    @property
    def right(self) -> tuple[float, float]:
        return self.x + COLUMN - 2 * INSET, self.y + BOX / 2


@dataclass(frozen=True)
class _Sheet:
    """A scene with the places of the boxes of a graph; `across` is the number of columns in a row."""

    scene: Scene
    graph: FoldedGraph
    places: dict[int, _Place]
    across: int

    def list_arcs(self) -> list[Arc]:
        """Return the arcs to draw, the largest first."""
        # Numbers, such as the size of a tensor, have no bytes, and would hide the tensors.
        drawn = [arc for arc in self.graph.arcs if arc.forward_bytes > 0]
        return sorted(drawn, key=lambda arc: (-arc.forward_bytes, arc.source, arc.target))

    def stages(self, arc: Arc) -> tuple[int, int]:
        """Return the stages that an arc leads from and to."""
        return self.graph.folds[arc.source].stage, self.graph.folds[arc.target].stage

    def is_beside(self, arc: Arc) -> bool:
        """Return whether both ends of an arc are in the same row of columns."""
        a, b = self.stages(arc)
        return a // self.across == b // self.across


def draw_graph(plan: Plan, costs: Costs | None) -> Scene:
    """Return the graph of a plan with its stages; without costs only the ends of each stage are known.

    The columns of a long pipeline stand in several rows.
    """
    count = len(plan.stages)
    graph = fold_for_picture(plan, costs)
    across = count if count <= LONG else -(-count // -(-count // LONG))
    indent = GAP if count > across else 0.0
    scene = Scene("graph", f"The graph in {format_count(count, 'stage')}, with its cuts", 0.0, 0.0)
    scene.width = 2 * MARGIN + 2 * indent + across * COLUMN + (across - 1) * GAP
    slowest = max((fold.ms for fold in graph.folds), default=0.0)
    cuts = {cut.number: cut for cut in list_cuts(plan, costs)}
    sheet = _Sheet(scene, graph, {}, across)
    for first in range(0, count, across):
        numbers = range(first, min(count, first + across))
        boxes = max(len(graph.of_stage(number)) for number in numbers)
        top, below = scene.height, scene.height + HEAD + MARGIN + INSET + boxes * (BOX + SPACE)
        for number in numbers:
            x = MARGIN + indent + (number - first) * (COLUMN + GAP)
            _draw_column(scene, plan, number, plan.stages[number], (x, top + MARGIN, below - 4))
            for row, i in enumerate(graph.of_stage(number)):
                sheet.places[i] = _Place(x + INSET, top + HEAD + MARGIN + row * (BOX + SPACE))
                _draw_box(scene, i, graph.folds[i], sheet.places[i], slowest)
            if number in cuts:
                _draw_cut(scene, cuts[number], x - GAP, top + MARGIN)
        lanes = _draw_far(sheet, numbers, below)
        scene.height = below + lanes + MARGIN
    _draw_arcs(sheet)
    return scene


def fold_for_picture(plan: Plan, costs: Costs | None) -> FoldedGraph:
    """Return the boxes and arcs that `draw_graph` draws; their keys are "fold" and the number of a box."""
    if costs is None:
        return _fold_places(plan)
    return fold_graph(plan, costs, MOST_IN_LONG if len(plan.stages) > LONG else MOST)


def _fold_places(plan: Plan) -> FoldedGraph:
    """Return one box for each stage, of a plan with unknown costs."""
    return FoldedGraph(tuple(Fold(i, stage.place, None, ()) for i, stage in enumerate(plan.stages)), ())


def _draw_column(scene: Scene, plan: Plan, number: int, stage: StagePlan, at: tuple[float, float, float]) -> None:
    """Draw the panel of a stage, and its head: number, device, time of a microbatch. `at` is left, top and bottom."""
    x, top, bottom = at
    panel = Box(x, top, COLUMN, bottom - top, "faint", edge=edge_of(number), round=6.0, key=f"stage {number}")
    names = "+".join(plan.device_names[d] for d in stage.devices)
    slowest = stage.load_ms == plan.bottleneck_ms
    load = f"{format_ms(stage.load_ms)}" + ", the slowest" * slowest + ", recomputes" * stage.recompute
    room = COLUMN - 2 * INSET
    own, bold = measure(f"stage {number}  ", 14.0), 14.0
    scene.add(
        panel,
        Label(x + INSET, top + 19, f"stage {number}", edge_of(number), bold, bold=True),
        Label(x + INSET + own, top + 19, fit(names, room - own, MONO, mono=True), "ink", MONO, mono=True),
        Label(x + INSET, top + 37, load, "alarm" if slowest else "ink", bold=slowest),
        Label(
            x + INSET,
            top + 54,
            f"{format_count(len(stage.nodes), 'node')}, memory {format_bytes(stage.memory_bytes)}",
            "muted",
            11.0,
        ),
    )


def _draw_box(scene: Scene, number: int, fold: Fold, place: _Place, slowest: float) -> None:
    """Draw the box of a module: its name, its time, and a bar as long as its time."""
    width = COLUMN - 2 * INSET
    time = "" if not fold.nodes else f"{format_ms(fold.ms)}, {format_count(len(fold.nodes), 'node')}"
    hint = f"{fold.name}: {time}" if time else fold.name
    scene.add(
        Box(
            place.x,
            place.y,
            width,
            BOX,
            fill_of(fold.stage),
            edge=edge_of(fold.stage),
            round=4.0,
            key=f"fold {number}",
            hint=hint,
        ),
        Label(place.x + 7, place.y + 14, fit(fold.name, width - 14, MONO, mono=True), "ink", MONO, mono=True),
        Label(place.x + 7, place.y + 27, time, "ink", SMALL),
    )
    if slowest:
        long = (width - 14) * fold.ms / slowest
        scene.add(Box(place.x + 7, place.y + BOX - 7, max(long, 0.5), 3.0, edge_of(fold.stage)))


def _draw_cut(scene: Scene, cut: Cut, x: float, top: float) -> None:
    """Draw the bytes that cross a cut for each microbatch, between the heads of two columns."""
    middle = x + GAP / 2
    lines = [(f"cut {cut.number}", "ink", True)]
    lines.append((f"{format_bytes(cut.forward_bytes)} forward", "ink", False))
    lines.append((f"{format_bytes(cut.backward_bytes)} back", "ink", False))
    lines.append(
        (f"{format_ms(cut.transfer_ms)} of transfer" if cut.transfer_ms else "transfer is free", "muted", False)
    )
    scene.add(
        *(
            Label(middle, top + 12 + 15 * i, text, role, 12.0 if bold else 11.0, "middle", bold=bold)
            for i, (text, role, bold) in enumerate(lines)
        )
    )


def _draw_arcs(sheet: _Sheet) -> None:
    """Draw the arcs inside of columns and over cuts. If many arcs pass boxes of their column, draw the largest."""
    skips: dict[int, int] = defaultdict(int)
    crossing: list[Arc] = []
    for arc in sheet.list_arcs():
        source, target = sheet.stages(arc)
        if source != target:
            crossing.append(arc)
        elif arc.target == arc.source + 1:
            a, b = sheet.places[arc.source], sheet.places[arc.target]
            x = a.x + (COLUMN - 2 * INSET) / 2
            sheet.scene.add(Stroke([(x, a.y + BOX), (x, b.y)], "muted", 1.2, arrow=True))
        elif skips[source] < MOST_SKIPS:
            skips[source] += 1
            _draw_skip(sheet.scene, arc, sheet.places)
    for arc in crossing:
        source, target = sheet.stages(arc)
        if not sheet.is_beside(arc):
            _draw_ends(sheet, arc)
        elif target == source + 1:
            _draw_crossing(sheet.scene, arc, sheet.places, source)
    _name_crossing(sheet.scene, crossing, sheet.places)


def _draw_ends(sheet: _Sheet, arc: Arc) -> None:
    """Draw only the two ends of an arc that leads to another row of columns."""
    (x, y), (into, height) = sheet.places[arc.source].right, sheet.places[arc.target].left
    source, target = sheet.stages(arc)
    width, hint = _find_width(arc.forward_bytes), _describe(arc)
    stub = INSET + 14.0
    sheet.scene.add(
        Stroke([(x, y), (x + stub, y)], edge_of(source), width, arrow=True, hint=f"{hint}, to stage {target}"),
        Stroke([(into - stub, height), (into, height)], edge_of(source), width, arrow=True, hint=hint),
        Label(into - stub - 3, height + 4, f"from stage {source}", edge_of(source), SMALL, "end"),
    )


def _draw_skip(scene: Scene, arc: Arc, places: dict[int, _Place]) -> None:
    """Draw an arc that passes boxes of its own column, on the left of them."""
    a, b = places[arc.source].left, places[arc.target].left
    out = min(INSET - 2.0, 4.0 + abs(b[1] - a[1]) / 60)
    points = [a, (a[0] - out, a[1]), (a[0] - out, b[1]), b]
    scene.add(Stroke(points, "muted", 1.0, arrow=True, hint=_describe(arc)))


def _draw_crossing(scene: Scene, arc: Arc, places: dict[int, _Place], stage: int) -> None:
    """Draw an arc over a cut, the thicker the more bytes it has."""
    a, b = places[arc.source].right, places[arc.target].left
    bend = (b[0] - a[0]) / 2
    points = [a, (a[0] + bend, a[1]), (b[0] - bend, b[1]), b]
    width = _find_width(arc.forward_bytes)
    scene.add(Stroke(points, edge_of(stage), width, curved=True, arrow=True, hint=_describe(arc)))


def _draw_far(sheet: _Sheet, numbers: range, below: float) -> float:
    """Draw the arcs that pass whole stages of a row, in lanes below it; return the height of the lanes."""
    far = [
        arc
        for arc in sheet.list_arcs()
        if (ends := sheet.stages(arc))[0] in numbers and ends[1] in numbers and ends[1] > ends[0] + 1
    ]
    for lane, arc in enumerate(far[:MOST_LANES]):
        a, b, y = sheet.places[arc.source].right, sheet.places[arc.target].left, below + 8 + lane * LANE
        out, into = a[0] + INSET + 6 + lane * 2, b[0] - INSET - 12 - lane * 2
        points = [a, (out, a[1]), (out, y), (into, y), (into, b[1]), b]
        role, width = edge_of(sheet.stages(arc)[0]), _find_width(arc.forward_bytes)
        sheet.scene.add(Stroke(points, role, width, arrow=True, dashed=True, hint=_describe(arc)))
    if len(far) > MOST_LANES:
        y = below + 12 + MOST_LANES * LANE
        sheet.scene.add(Label(MARGIN, y, f"and {len(far) - MOST_LANES} more that pass a stage", "muted", SMALL))
    return (min(len(far), MOST_LANES) + (len(far) > MOST_LANES)) * LANE + 8 * bool(far)


def _name_crossing(scene: Scene, arcs: Sequence[Arc], places: dict[int, _Place]) -> None:
    """Write the values that leave a box over a cut above the beginning of its arcs, and their bytes below."""
    leaving: dict[int, list[Arc]] = defaultdict(list)
    for arc in arcs:
        leaving[arc.source].append(arc)
    for source, own in leaving.items():
        names = list(dict.fromkeys(name for arc in own for name in arc.names))
        # A value that several boxes read crosses a cut once.
        bytes_ = max(arc.forward_bytes for arc in own) if len(names) == 1 else sum(arc.forward_bytes for arc in own)
        text = names[0] if len(names) == 1 else f"{len(names)} values"
        x, y = places[source].right
        shown, size = fit(text, GAP - 20, SMALL, mono=True), format_bytes(bytes_)
        left, wide = x + INSET + 4, max(measure(shown, SMALL, mono=True), measure(size, SMALL) * 1.1)
        scene.add(
            Box(left, y - 14, wide + 4, 11, "paper", round=2.0),
            Box(left, y + 4, measure(size, SMALL) * 1.1 + 4, 11, "paper", round=2.0),
            Label(left + 2, y - 5, shown, "ink", SMALL, mono=True),
            Label(left + 2, y + 13, size, "ink", SMALL, bold=True),
        )


def _find_width(bytes_: float) -> float:
    """Return the width of an arc in pixels: one more for each factor of 32 above a KiB."""
    return 1.2 + max(0.0, log2(max(bytes_, 1.0) / 1024.0)) / 5.0


def _describe(arc: Arc) -> str:
    """Return the values of an arc in words."""
    few = ", ".join(arc.names[:4]) + (f" and {len(arc.names) - 4} more" if len(arc.names) > 4 else "")
    return f"{few}: {format_bytes(arc.forward_bytes)} forward"
