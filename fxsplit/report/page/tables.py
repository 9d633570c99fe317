"""The tables of the page: the figures of its pictures, so that a reader can do without the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxsplit.ir.facts.plan import Plan
from fxsplit.report.graph.cuts import list_cuts
from fxsplit.report.page.story import Story, Trial
from fxsplit.report.page.words import compare_trial, find_base
from fxsplit.report.pictures.bars import MEMORY, split_load
from fxsplit.report.pictures.plan import find_limits
from fxsplit.schedule.simulation.idle import CAUSES, explain_idle, sum_causes
from fxsplit.schedule.taxonomy import classify_plan
from fxsplit.system.figures import format_bytes, format_ms, format_share


@dataclass(frozen=True)
class HtmlTable:
    """A table with a caption; a `>` before a head aligns its column on the right, for numbers."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def list_tables(story: Story) -> dict[str, HtmlTable]:
    """Return the tables by name."""
    return {
        "stages": _tell_stages(story.plan),
        "kind": _tell_kind(story.plan),
        "memory": _tell_memory(story.plan),
        "cuts": _tell_cuts(story),
        "idle": _tell_idle(story),
        "what if": _tell_trials("What if", story.list_trials("what if"), find_base(story)),
        "layers": _tell_trials("A layer twice as fast", story.list_trials("layer"), find_base(story)),
    }


def _tell_stages(plan: Plan) -> HtmlTable:
    kinds = [k for k in ("forward", "recompute", "backward", "weight gradient", "receive", "send", "sum of replicas")
             if any(k in split_load(s, plan) for s in plan.stages)]  # fmt: skip
    rows = []
    for i, stage in enumerate(plan.stages):
        load = split_load(stage, plan)
        idle = 1.0 - stage.load_ms / plan.bottleneck_ms if plan.bottleneck_ms else 0.0
        names = "+".join(plan.device_names[d] for d in stage.devices)
        figures = [format_ms(load.get(kind, 0.0)) for kind in kinds]
        rows.append([f"stage {i}", names, stage.place, *figures, format_ms(stage.load_ms), format_share(idle)])
    heads = [
        "stage",
        "device",
        "part of the model",
        *(f">{kind}" for kind in kinds),
        ">in all",
        ">less than the slowest",
    ]
    return HtmlTable("Time of each stage for a microbatch", heads, rows)


def _tell_kind(plan: Plan) -> HtmlTable:
    kind = classify_plan(plan)
    if kind is None:
        return HtmlTable("The kind of parallel training", ["figure", "this plan"], [])
    words = [["parallelism", kind.parallelism], ["synchronisation", kind.synchronisation], ["weights", kind.weights]]
    sent = [[f"sent in a step: {name}", format_bytes(bytes_)] for name, bytes_ in kind.list_bytes()]
    return HtmlTable("The kind of parallel training", ["figure", "this plan"], [*words, *sent])


def _tell_memory(plan: Plan) -> HtmlTable:
    kinds = [p.name for p in MEMORY if any(s.memory_kinds.get(p.name, 0.0) > 0 for s in plan.stages)]
    rows = []
    for i, (stage, limit) in enumerate(zip(plan.stages, find_limits(plan), strict=True)):
        sizes = [format_bytes(stage.memory_kinds.get(kind, 0.0)) for kind in kinds]
        known = limit < float("inf")
        share = format_share(stage.memory_bytes / limit) if known else "-"
        limit_text = format_bytes(limit) if known else "not known"
        rows.append([f"stage {i}", *sizes, format_bytes(stage.memory_bytes), limit_text, share])
    heads = ["stage", *(f">{kind}" for kind in kinds), ">in all", ">limit", ">used"]
    return HtmlTable("Memory of each stage in its fullest moment", heads, rows)


def _tell_cuts(story: Story) -> HtmlTable:
    known = {best.number: best for best in story.next_best}
    rows = []
    for cut in list_cuts(story.plan, story.plan.costs):
        best = known.get(cut.number)
        without = "not searched" if best is None else "no plan"
        if best is not None and best.bottleneck_ms is not None:
            more = best.bottleneck_ms / story.plan.bottleneck_ms - 1.0 if story.plan.bottleneck_ms else 0.0
            without = f"{format_ms(best.bottleneck_ms)}, {100 * more:+.2f} %"
        largest = [value for value in cut.values if value.both_bytes]
        values = ", ".join(f"{v.name} {format_bytes(v.both_bytes)}" for v in largest[:5])
        values += f" and {len(largest) - 5} more" if len(largest) > 5 else ""
        there, back = format_bytes(cut.forward_bytes), format_bytes(cut.backward_bytes)
        rows.append([f"cut {cut.number}", there, back, format_ms(cut.transfer_ms), values or "-", without])
    heads = ("cut", ">forward", ">back", ">transfer", "largest values, both ways", ">slowest stage without it")
    return HtmlTable("Cuts, for each microbatch", heads, rows)


def _tell_idle(story: Story) -> HtmlTable:
    caption = "Idle time of each device in the predicted step, by cause"
    heads = ["device", ">computes", *(f">{name}" for name in SHORT.values()), ">idle"]
    if story.simulation is None or story.predicted is None:
        return HtmlTable(caption, heads, [])
    simulation, step_ms = story.simulation, story.simulation.step_ms or 1.0
    rows = []
    for device, idle in enumerate(explain_idle(simulation)):
        causes, bubble = sum_causes(idle), simulation.bubbles[device]
        shares = [format_share(causes.get(cause, 0.0) / step_ms) for cause in CAUSES]
        rows.append([story.predicted.devices[device], format_share(1.0 - bubble), *shares, format_share(bubble)])
    return HtmlTable(caption, heads, rows)


SHORT = {
    "fill": "fills",
    "stage": "waits for a stage",
    "transfer": "waits for a message",
    "launch": "waits for its host",
    "replica": "waits for a replica",
    "drain": "empties",
}
"""Causes of idle time as heads of columns."""


def _tell_trials(caption: str, trials: Sequence[Trial], base: Trial | None) -> HtmlTable:
    rows = []
    for trial in trials:
        slowest = "-" if trial.bottleneck_ms is None else format_ms(trial.bottleneck_ms)
        step = "no plan" if trial.step_ms is None else format_ms(trial.step_ms)
        change = "" if trial is base else compare_trial(trial, base).partition(", ")[2]
        bubble = "-" if trial.bubble is None else format_share(trial.bubble)
        rows.append([trial.change, step, change, slowest, bubble, trial.note])
    heads = ("change", ">step", ">against now", ">slowest stage", ">bubble", "note")
    return HtmlTable(caption, heads, rows)


def list_grid(story: Story) -> list[HtmlTable]:
    """Return the grid of steps over devices and bandwidths as a table, if it was tried."""
    trials = story.list_trials("grid")
    if not trials:
        return []
    rows, columns = (list(dict.fromkeys(trial.place[i] for trial in trials)) for i in range(2))
    found = {trial.place: trial for trial in trials}
    cells = []
    for row in rows:
        steps = [found.get((row, column)) for column in columns]
        cells.append([row, *("-" if t is None or t.step_ms is None else format_ms(t.step_ms) for t in steps)])
    return [HtmlTable("Predicted step by devices and links", ["", *(f">{column}" for column in columns)], cells)]
