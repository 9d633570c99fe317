"""A plan as a graph of Graphviz: a cluster for each stage with its nodes, and thick edges where values cross cuts.

digraph plan {
  subgraph cluster_0 { label="stage 0 on cpu:0, 3.21 ms"; "a"; "b"; }
  "b" -> "c" [label="1.0 KiB", penwidth=3];
}
"""

from __future__ import annotations

from fxsplit.ir.facts.costs.costs import Costs, NodeCost
from fxsplit.ir.facts.plan import Plan
from fxsplit.report.drawing.theme import LIGHT, edge_of, fill_of
from fxsplit.system.figures import format_bytes, format_ms


def write_dot(plan: Plan, costs: Costs) -> str:
    """Return the text of a graph in the language DOT; the plan was made from `costs`."""
    stage_of = plan.stage_of()
    lines = ["digraph plan {", '  rankdir=LR; node [shape=box, style=filled, fontname="sans-serif"];']
    lines += [f"  {_quote(i.name)} [label={_quote(f'{i.name} (input)')}, fillcolor=white];" for i in costs.inputs]
    for number, stage in enumerate(plan.stages):
        devices = "+".join(plan.device_names[d] for d in stage.devices)
        label = _quote(f"stage {number} on {devices}, {format_ms(stage.load_ms)}")
        looks = f'color="{LIGHT[edge_of(number)]}"; fontcolor="{LIGHT[edge_of(number)]}"'
        lines.append(f"  subgraph cluster_{number} {{ label={label}; {looks};")
        colour = LIGHT[fill_of(number)]
        lines += [_write_node(costs.by_name[name], colour) for name in stage.nodes]
        lines.append("  }")
    for name, forward_bytes, _, readers, _ in costs.values:
        for reader in readers:
            crosses = name in stage_of and stage_of[name] != stage_of[reader]
            more = f" [label={_quote(format_bytes(forward_bytes))}, penwidth=3]" if crosses else ""
            lines.append(f"  {_quote(name)} -> {_quote(reader)}{more};")
    return "\n".join([*lines, "}\n"])


def _write_node(node: NodeCost, colour: str) -> str:
    """Return a node with its place, operator and time."""
    text = f"{node.place}\n{node.op}\n{format_ms(node.forward_ms + node.backward_ms)}"
    return f'    {_quote(node.name)} [label={_quote(text)}, fillcolor="{colour}"];'


def _quote(text: str) -> str:
    """Return a text in quotes of DOT, in which a backslash begins an escape."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
