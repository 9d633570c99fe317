"""Plans for viewers of graphs: every node and edge, with names as text, and read by the viewers where installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fxsplit
from fxsplit.cli import main as cli
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.report.export.dot import write_dot
from fxsplit.report.export.model_explorer import write_model_explorer
from tests.report.plans import COSTS, make_plan

ODD = 'a"b\\c/d <e>'


def test_dot_has_stages_nodes_and_cut_edges() -> None:
    text = write_dot(make_plan(), COSTS)
    clusters = re.findall(r"subgraph cluster_(\d+) \{ label=\"stage \d on (\w+), ", text)
    assert clusters == [("0", "device0"), ("1", "device1")]
    edges = re.findall(r'"(\w+)" -> "(\w+)"( \[label="1000 B", penwidth=3\])?;', text)
    assert [(a, b) for a, b, _ in edges] == [(i, n.name) for n in COSTS.nodes for i in n.inputs]
    assert [(a, b) for a, b, cut in edges if cut] == [("relu_1", "linear_2")]


def test_dot_is_read_by_graphviz(tmp_path: Path) -> None:
    if shutil.which("dot") is None:
        pytest.skip("Graphviz is not installed: apt-get install graphviz")
    nodes = (replace(COSTS.nodes[0], module=ODD), *COSTS.nodes[1:])
    costs = replace(COSTS, nodes=nodes)
    (tmp_path / "plan.dot").write_text(write_dot(fxsplit.plan(costs, Machine.planned(2)), costs))
    done = subprocess.run(["dot", "-Tsvg", tmp_path / "plan.dot"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "" and "stage 1 on device1" in done.stdout
    assert "a&quot;b\\c/d &lt;e&gt;" in done.stdout, "the name is text"


def read_files() -> dict[str, Any]:
    nodes = (replace(COSTS.nodes[0], module=ODD), *COSTS.nodes[1:])
    costs = replace(COSTS, nodes=nodes)
    plan = fxsplit.plan(costs, Machine.planned(2))
    return {name: json.loads(text) for name, text in write_model_explorer(plan, costs).items()}


def test_model_explorer_has_the_graph_and_data_of_every_node() -> None:
    files = read_files()
    (graph,) = files["model-explorer.json"]
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert set(nodes) == {"x", *COSTS.by_name}
    for node in COSTS.nodes:
        assert [edge["sourceNodeId"] for edge in nodes[node.name]["incomingEdges"]] == list(node.inputs)
    assert nodes["relu_2"]["namespace"] == "stage 1/layers/2" and nodes["x"]["namespace"] == ""
    assert nodes["linear_0"]["namespace"] == 'stage 0/a"b\\c_d <e>', "a slash in a name is no folder"
    for name in ("stage", "ms", "bytes"):
        data = files[f"model-explorer-{name}.json"][graph["id"]]
        assert set(data["results"]) == set(COSTS.by_name)
    assert files["model-explorer-ms.json"][graph["id"]]["results"]["head"]["value"] == 3.0


def test_model_explorer_reads_its_own_classes() -> None:
    builder = pytest.importorskip("model_explorer.graph_builder", reason="pip install ai-edge-model-explorer")
    data = pytest.importorskip("model_explorer.node_data_builder")
    files = read_files()
    for graph in files["model-explorer.json"]:
        builder.Graph(**graph)
        for node in graph["nodes"]:
            builder.GraphNode(**node)
            [builder.IncomingEdge(**edge) for edge in node["incomingEdges"]]
    for name in ("stage", "ms", "bytes"):
        for held in files[f"model-explorer-{name}.json"].values():
            data.GraphNodeData(**held)
            [data.NodeDataResult(**result) for result in held["results"].values()]


@pytest.mark.parametrize("kind", ["dot", "model-explorer"])
def test_the_command_writes_the_files(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    COSTS.save(tmp_path / "profile.json")
    base = ["plan", str(tmp_path / "profile.json"), "--devices", "2", "--emit", kind, "--to"]
    assert cli.main([*base, str(tmp_path / "out")]) == 0
    assert f"written to {tmp_path / 'out'}" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["plan.dot"] if kind == "dot" else names[0] == "model-explorer-bytes.json" and len(names) == 4
    assert cli.main([*base, str(tmp_path / "out"), "--json"]) == 0
    assert sorted(json.loads(capsys.readouterr().out)["files"]) == names
    assert cli.main([*base, str(tmp_path / "profile.json")]) == 2, "a file is no folder"
