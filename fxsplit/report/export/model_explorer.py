"""A plan for Model Explorer (ai.google.dev/edge/model-explorer): its graph, and data of nodes that colour it.

Open `model-explorer.json` as a model, and load the other files as node data: stage, time and bytes of each node.

[{"id": "plan", "nodes": [{"id": "relu", "label": "call_function:relu", "namespace": "stage 0/layers/0", ...}]}]
{"plan": {"name": "ms", "results": {"relu": {"value": 0.25}}, "gradient": [...]}}
"""

from __future__ import annotations

import json
from typing import Any

from fxsplit.ir.facts.costs.costs import Costs, NodeCost
from fxsplit.ir.facts.plan import Plan
from fxsplit.report.drawing.theme import LIGHT, edge_of, fill_of
from fxsplit.system.figures import format_bytes, format_ms

GRAPH = "plan"
"""The name of the graph, by which node data find it."""
PALE, STRONG = "#fff4e0", "#d9534f"


def write_model_explorer(plan: Plan, costs: Costs) -> dict[str, str]:
    """Return the files by name: the graph, and the node data; the plan was made from `costs`."""
    stage_of = plan.stage_of()
    ms = {n.name: n.forward_ms + n.backward_ms for n in costs.nodes}
    bytes_ = {n.name: n.output_bytes + n.kept_bytes + n.parameter_bytes for n in costs.nodes}
    stages = {
        name: {"value": s, "bgColor": LIGHT[fill_of(s)], "textColor": LIGHT["ink"]} for name, s in stage_of.items()
    }
    return {
        "model-explorer.json": _write([_make_graph(plan, costs)]),
        "model-explorer-stage.json": _write({GRAPH: {"name": "stage", "results": stages}}),
        "model-explorer-ms.json": _write({GRAPH: _make_data("ms for a microbatch", ms)}),
        "model-explorer-bytes.json": _write({GRAPH: _make_data("bytes of result, activations and parameters", bytes_)}),
    }


def _make_graph(plan: Plan, costs: Costs) -> dict[str, Any]:
    """Return the graph: nodes lie in the folders of their stage and of their modules inside of it."""
    stage_of = plan.stage_of()
    inputs = [{"id": i.name, "label": "input", "namespace": "", "attrs": [], "incomingEdges": []} for i in costs.inputs]
    nodes = [_make_node(node, stage_of[node.name]) for node in costs.nodes]
    configs = [
        {"namespaceRegex": f"^stage {i}$", "backgroundColor": LIGHT[fill_of(i)], "borderColor": LIGHT[edge_of(i)]}
        for i in range(len(plan.stages))
    ]
    return {"id": GRAPH, "nodes": [*inputs, *nodes], "groupNodeConfigs": configs}


def _make_node(node: NodeCost, stage: int) -> dict[str, Any]:
    """Return a node with its times and bytes as attributes."""
    figures = {
        "stage": str(stage),
        "name": node.name,
        "forward": format_ms(node.forward_ms),
        "backward": format_ms(node.backward_ms),
        "result": format_bytes(node.output_bytes),
        "kept for backward": format_bytes(node.kept_bytes),
        "parameters": format_bytes(node.parameter_bytes),
    }
    # A slash in a name would be one more folder.
    parts = [part.replace("/", "_") for part in node.owner.split(".") if part]
    edges = [
        {"sourceNodeId": name, "sourceNodeOutputId": "0", "targetNodeInputId": str(i)}
        for i, name in enumerate(node.inputs)
    ]
    made = [{"id": "0", "attrs": [{"key": "tensor_shape", "value": node.made}]}] if node.made else []
    return {
        "id": node.name,
        "label": node.op or node.name,
        "namespace": "/".join([f"stage {stage}", *parts]),
        "attrs": [{"key": key, "value": value} for key, value in figures.items()],
        "incomingEdges": edges,
        "outputsMetadata": made,
    }


def _make_data(name: str, values: dict[str, float]) -> dict[str, Any]:
    """Return node data with a colour from pale for the least to strong for the most."""
    gradient = [{"stop": 0, "bgColor": PALE}, {"stop": 1, "bgColor": STRONG}]
    return {"name": name, "results": {k: {"value": v} for k, v in values.items()}, "gradient": gradient}


def _write(data: Any) -> str:
    return json.dumps(data, indent=1) + "\n"
