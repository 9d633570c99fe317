"""The sections of the page: how to read each, its pictures and tables, and why something is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fxsplit.report.drawing.scene import Scene
from fxsplit.report.drawing.svg import write_svg
from fxsplit.report.page.script_data import count_spans
from fxsplit.report.page.story import Story
from fxsplit.report.page.tables import HtmlTable, list_grid, list_tables
from fxsplit.report.pictures.bars import draw_loads, draw_memory
from fxsplit.report.pictures.graph import draw_graph
from fxsplit.report.pictures.places import draw_places
from fxsplit.report.pictures.plan import find_device_limits, find_limits
from fxsplit.report.pictures.timeline import draw_timelines
from fxsplit.schedule.simulation.idle import find_critical_path

MOST_KEYED, MOST_DRAWN = 4000, 12_000
"""If timelines have more blocks than MOST_KEYED, the blocks have no hints; with more than MOST_DRAWN none is drawn.

So the page stays small.
"""
TITLES = {
    "stages": "Time: how busy each stage is",
    "memory": "Memory: what fills each stage",
    "graph": "Graph: where the model is cut",
    "cuts": "Cuts: why here",
    "timeline": "Timeline: one step",
    "passes": "Passes: how the plan was made",
    "what-if": "What if: other hardware, microbatches and layers",
}
"""The title of each section by its anchor, in the order of the page. The part before the colon is its link."""
ABOUT = {
    "stages": "Each bar is the time in which a stage is busy with one microbatch. The red line is the slowest stage, "
    "which sets the pace. The green line is the lower bound: no split has a faster slowest stage. If there is only one "
    "line, the slowest stage is at the bound.",
    "memory": "Each bar is the memory of a stage in its fullest moment, by what fills it. A red line is the limit of "
    "its device, if one is known and near.",
    "graph": "A column is a stage, and a box is a module in it. The bar in a box is its time. Thick lines are the "
    "values that cross a cut, for each microbatch, and dashed lines are values that a stage only passes on. Click a "
    "box, or unfold modules below, to see their nodes.",
    "cuts": "Each dot is a place where the graph can be cut: how much of the work lies before it, and how many bytes "
    "would cross it. Numbered circles are the cuts of this plan. A good cut shares the work evenly and sends few "
    "bytes.",
    "timeline": "A row is a device, a block is the work of one stage on the microbatch with this number, and gaps are "
    "idle time. Blocks with a strong border are the critical path: the step becomes shorter only if one of them does.",
    "passes": "fxsplit makes a plan in passes. Each takes a graph with facts about it, and adds or changes some.",
    "what-if": "Each row is the best plan after one change, and its predicted step for the same batch. The first row "
    "is the best plan without a change, to compare with.",
}
"""How to read each section."""
NO_COSTS = "The plan was read without its profile: fxsplit report PLAN.json --profile FILE shows this."


@dataclass(frozen=True)
class Section:
    """A section of the page by its anchor, with pictures as SVG and tables.

    `missing` says why there is nothing to show, or less than there could be. `special` names a part that only this
    section has.
    """

    anchor: str
    pictures: Sequence[Any] = ()
    tables: Sequence[HtmlTable] = ()
    missing: str = ""
    special: str = ""

    @property
    def title(self) -> str:
        """The title."""
        return TITLES[self.anchor]

    @property
    def about(self) -> str:
        """How to read it."""
        return ABOUT[self.anchor]


def list_sections(story: Story) -> list[Section]:
    """Return the sections in the order of the page."""
    plan, tables, known = story.plan, list_tables(story), story.plan.costs is not None
    places = [] if story.curve is None else [_draw(draw_places(story.curve, plan))]
    grid = [t for t in (tables["what if"], tables["layers"], *list_grid(story)) if t.rows]
    lost = "The passes are not known: a dump folder or a pipeline has them."
    return [
        Section("stages", [_draw(draw_loads(plan))], [tables["stages"], *[tables["kind"]] * bool(tables["kind"].rows)]),
        Section("memory", [_draw(draw_memory(plan, find_limits(plan)))], [tables["memory"]]),
        Section("graph", [_draw(draw_graph(plan, plan.costs))], (), "" if known else NO_COSTS, "graph" * known),
        Section("cuts", places, [tables["cuts"]] * (len(plan.stages) > 1), "" if known else NO_COSTS),
        _tell_timeline(story, tables["idle"]),
        Section("passes", missing="" if story.passes else lost, special="passes" * bool(story.passes)),
        Section("what-if", tables=grid, missing=_say_missing(story)),
    ]


def _say_missing(story: Story) -> str:
    """Return why trials are missing; nothing if none are."""
    if not story.trials:
        return f"Nothing was tried: {story.trials_left_out or 'there was no time for it'}."
    return f"Some rows are missing: {story.trials_left_out}." if story.trials_left_out else ""


def _tell_timeline(story: Story, idle: HtmlTable) -> Section:
    """Return the section of the timeline."""
    timelines = [t for t in (story.predicted, story.measured) if t is not None]
    if not timelines:
        return Section("timeline", missing="The schedule of the plan does not run these stages.")
    count = count_spans(story)
    if count > MOST_DRAWN:
        many = (
            f"The step has {count:,} actions, too many for a page: fxsplit simulate --trace writes them for Perfetto."
        )
        return Section("timeline", tables=[idle], missing=many)
    keyed, path = count <= MOST_KEYED, _find_path(story)
    limits = find_device_limits(story.plan, timelines[0])
    scene = draw_timelines(timelines, memory=True, limits=limits, path=path, keyed=keyed)
    return Section("timeline", [_draw(scene)], [idle], special="timeline" * keyed)


def _find_path(story: Story) -> list[tuple[int, int]]:
    """Return the critical path, as (device, position in the device's row) in the predicted timeline.

    The positions differ from those in the schedule, since the timeline leaves out actions that take no time.
    """
    if story.simulation is None or story.predicted is None:
        return []
    place = {(d, span.action): i for d, row in enumerate(story.predicted.spans) for i, span in enumerate(row)}
    path = find_critical_path(story.simulation)
    actions = [(device, story.simulation.schedule.actions[device][number]) for device, number in path]
    return [(at[0], place[at]) for at in actions if at in place]


def _draw(scene: Scene) -> Any:
    """Return a scene as SVG, which takes its colours from the page."""
    from markupsafe import Markup  # of jinja2, which only reports load

    return Markup(write_svg(scene, None))
