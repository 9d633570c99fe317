"""The data of the page's script: nodes and actions as columns, which are a third of the size of records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.report.graph.fold import FoldedGraph
from fxsplit.report.page.story import Story
from fxsplit.schedule.action import NAMES
from fxsplit.system.figures import replace_infinite


def write_data(story: Story, graph: FoldedGraph | None, keyed: bool) -> str:
    """Return the data as JSON that may stand in a <script> of HTML.

    `graph` is the folded graph of the picture. `keyed` says whether the blocks of the timelines have keys, by which the
    script finds the action of a block; without keys the timelines are left out.
    """
    plan = story.plan
    data = {
        "stages": [
            {
                "name": f"stage {i}",
                "devices": "+".join(plan.device_names[d] for d in stage.devices),
                "load": _round(stage.load_ms),
                "place": stage.place,
            }
            for i, stage in enumerate(plan.stages)
        ],
        "operations": NAMES,
        "nodes": None if plan.costs is None else _list_nodes(story, plan.costs),
        "folds": None if graph is None else _list_folds(graph, plan.costs),
        "timelines": _list_timelines(story) if keyed else [],
    }
    return guard_script(json.dumps(replace_infinite(data), allow_nan=False, separators=(",", ":")))


def guard_script(text: str) -> str:
    """Return JSON for a <script>: no name in the model can end the script, or begin a comment of HTML."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class _Words:
    """Numbers for words, so that a word that many nodes share is written once."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, word: str) -> int:
        """Return the number of a word, a new one for a new word."""
        if word not in self._numbers:
            self._numbers[word] = len(self.words)
            self.words.append(word)
        return self._numbers[word]


def _list_nodes(story: Story, costs: Costs) -> dict[str, Any]:
    """Return the nodes as columns; bytes are whole numbers.

    `reads` lists what each node reads, by number: first the nodes are numbered, then the model's inputs.
    """
    stage_of, words = story.plan.stage_of(), _Words()
    number = {name: i for i, name in enumerate([*costs.by_name, *(i.name for i in costs.inputs)])}
    together: dict[str, int] = {name: i for i, names in enumerate(costs.together) for name in names}
    return {
        "name": [n.name for n in costs.nodes],
        "inputs": [i.name for i in costs.inputs],
        "module": [words.number(n.owner) for n in costs.nodes],
        "op": [words.number(n.op) for n in costs.nodes],
        "made": [words.number(n.made) for n in costs.nodes],
        "note": [words.number(story.notes.get(n.name, "")) for n in costs.nodes],
        "stage": [stage_of[n.name] for n in costs.nodes],
        "forward": [_round(n.forward_ms) for n in costs.nodes],
        "backward": [_round(n.backward_ms) for n in costs.nodes],
        "output": [round(n.output_bytes) for n in costs.nodes],
        "kept": [round(n.kept_bytes) for n in costs.nodes],
        "parameters": [round(n.parameter_bytes) for n in costs.nodes],
        "reads": [[number[name] for name in n.inputs] for n in costs.nodes],
        "together": [together.get(n.name, -1) for n in costs.nodes],
        "words": words.words,
    }


def _list_folds(graph: FoldedGraph, costs: Costs | None) -> list[list[int]]:
    """Return the numbers of the nodes in each box of the picture."""
    number = {name: i for i, name in enumerate(costs.by_name)} if costs is not None else {}
    return [[number[node.name] for node in fold.nodes] for fold in graph.folds]


def _list_timelines(story: Story) -> list[dict[str, Any]]:
    """Return the timelines: for each device the actions as [stage, operation, microbatch, begin, end]."""
    return [
        {
            "title": timeline.title,
            "rows": [{"name": name, "spans": [_list_span(span) for span in spans]} for name, spans in timeline.rows],
        }
        for timeline in (story.predicted, story.measured)
        if timeline is not None
    ]


def _list_span(span: Sequence[Any]) -> list[Any]:
    action, begin_ms, end_ms = span
    return [action.stage, action.op, action.microbatch, _round(begin_ms, 6), _round(end_ms, 6)]


def _round(number: float, digits: int = 4) -> float:
    """Return a number rounded to `digits` significant digits."""
    return float(f"{number:.{digits}g}")


def count_spans(story: Story) -> int:
    """Return how many blocks the timelines have."""
    timelines: Iterable[Any] = (story.predicted, story.measured)
    return sum(len(spans) for t in timelines if t is not None for _, spans in t.rows)
