"""Stories for tests of the report: of a small model, and of as many nodes as wanted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import fxsplit
from fxsplit.api.report.gather import gather_story
from fxsplit.formats.plan_json import describe_plan
from fxsplit.ir.facts.costs.costs import Costs, InputCost, NodeCost
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.report.page.story import PassRow, Story
from fxsplit.schedule.simulation.timeline import Span, Timeline
from tests.report.plans import make_plan
from tests.support.graphs import node

ODD = '</script><script>alert("x")</script><b>&amp; {{ 7 * 7 }}'
"""A name that would break a page that takes it for more than text."""


@cache
def make_story() -> Story:
    """Return the story of a small plan with all that a report can tell, and with odd names."""
    plan = make_plan()
    story = gather_story(
        plan,
        model=f"Net{ODD}",
        passes=[PassRow("profile{repeats=1}", 0.25, {"operators": 3}, 2, 1, (f"+fact {ODD}", "-gone", " same"))],
        notes={"linear_0": f"Linear({ODD}) @ net.py:12"},
        commands=["fxsplit report plan.json -o report.html"],
        plan_json=describe_plan(plan),
    )
    assert story.predicted is not None
    return replace(story, measured=slow_down(story.predicted, 1.5))


def slow_down(timeline: Timeline, factor: float) -> Timeline:
    """Return a timeline whose actions take longer, as if it had been measured."""
    spans = tuple(
        tuple(Span(action, begin * factor, end * factor) for action, begin, end in row) for row in timeline.spans
    )
    return replace(timeline, title="1F1B, measured", spans=spans, memory=(), links=())


def make_costs(count: int) -> Costs:
    """Return a chain of layers with `count` nodes in all, ten in each, and a skip around each layer."""
    inside = ("attention.query", "attention.key", "attention", "attention.output", "mlp.up", "mlp", "mlp.down")
    parts = (*inside, "norm", "", "")
    nodes: list[NodeCost] = []
    for i in range(count):
        layer, part = divmod(i, len(parts))
        reads = [nodes[-1].name] if nodes else ["tokens"]
        if part == len(parts) - 1:
            reads.append(nodes[-part].name)
        module = f"model.layers.{layer}" + f".{parts[part]}" * bool(parts[part])
        made = node(f"layers_{layer}_{part}", reads, 0.2 + 0.07 * ((7 * i) % 5), output_bytes=65536.0)
        op = "call_function:linear" if part < 7 else "call_function:add"
        nodes.append(replace(made, module=module, op=op, made="float32[8, 128, 16]", parameter_bytes=1e6 * (part < 5)))
    return Costs(tuple(nodes), (InputCost("tokens", 4096.0, 0.0),), (nodes[-1].name,), rows=8)


@cache
def make_large_story(count: int, devices: int = 4) -> Story:
    """Return the story of a plan for `count` nodes, without trials."""
    machine = Machine.planned(devices, bytes_per_s=1e10, memory_bytes=64e9)
    plan = fxsplit.plan(make_costs(count), machine, n_microbatches=8)
    return gather_story(plan, model="Large", plan_json=describe_plan(plan), seconds=0.0)
