"""Observers of a chain: what is printed, compared and timed, and reproducers of failures."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from fxsplit.errors import BrokenFact, ChainError, MissingFact
from fxsplit.ir.chain import Chain
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.graph import IR
from fxsplit.ir.manager import run_chain
from fxsplit.ir.observers import Differ, Printer, Reproducer, Timer, find_chain
from fxsplit.passes import Order
from tests.support.graphs import node


def small_ir() -> IR:
    """Return the IR of one layer."""
    graph, root = fx.Graph(), nn.Module()
    root.layer = nn.Linear(2, 2)
    graph.output(graph.call_module("layer", (graph.placeholder("x"),)))
    return IR(fx.GraphModule(root, graph), model="Net")


def keep(ir: IR) -> IR:
    """Change nothing."""
    return ir


def rename(ir: IR) -> IR:
    """Give the graph a node more."""
    graph = fx.Graph()
    found: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(ir.gm.graph, found)
    graph.output(graph.call_function(torch.relu, (result,)))
    return ir.rewrite(fx.GraphModule(ir.gm, graph))


def test_changed_prints_only_passes_that_change_something() -> None:
    file = io.StringIO()
    run_chain(small_ir(), [keep, rename, keep], [Printer(after_passes=("changed",), file=file)])
    assert [line for line in file.getvalue().split("\n") if line.startswith("; ")][:1] == ["; after rename"]
    assert file.getvalue().count("fxsplit-ir 1") == 1


def test_before_and_failed() -> None:
    file = io.StringIO()

    def lose(ir: IR) -> IR:
        return ir.learn(Costs((node("a"),), (), ("a",), rows=1))

    with pytest.raises(BrokenFact):
        run_chain(small_ir(), [keep, lose], [Printer(("keep",), ("failed",), file)])
    told = [line for line in file.getvalue().split("\n") if line.startswith(("; before", "; after", "; failed"))]
    assert told[0] == "; before keep" and told[1].startswith("; failed after lose: ") and len(told) == 2


def test_a_diff_of_each_pass() -> None:
    file = io.StringIO()
    run_chain(small_ir(), [rename], [Differ(file)])
    lines = file.getvalue().split("\n")
    assert lines[:2] == ["--- before rename", "+++ after rename"]
    assert (
        "+  %relu = function torch.relu(%layer)" in lines
        and "-  return %layer" in lines
        and "+step tests.ir.test_observers:rename" in lines
    )


def test_a_time_of_each_pass() -> None:
    timer = Timer()
    run_chain(small_ir(), [keep, rename], [timer])
    assert [(row["pass"], row["nodes_before"], row["nodes_after"]) for row in timer.rows] == [
        ("keep", 3, 3),
        ("rename", 3, 4),
    ]
    assert all(isinstance(row["ms"], float) and row["ms"] >= 0 for row in timer.rows)
    assert str(timer).split("\n")[0].split() == ["pass", "ms", "nodes", "before", "after", "learnt", "forgot"]


def test_a_reproducer_has_the_passes_that_are_left(tmp_path: Path) -> None:
    path = tmp_path / "a.ir"
    with pytest.raises(MissingFact) as raised:
        run_chain(small_ir(), [keep, Order(), keep], [Reproducer(path)])
    text = path.read_text()
    assert find_chain(text) == "order,tests.ir.test_observers:keep"
    assert (
        "; error: MissingFact: no Costs yet" in text
        and "step tests.ir.test_observers:keep" in text
        and "fxsplit-ir 1\nmodel Net\n" in text
    )
    assert f"reproducer: fxsplit opt {path} --trust" in raised.value.__notes__
    assert find_chain("fxsplit-ir 1\n; chain: order\n") is None and find_chain("; a remark\n") is None
    assert str(Chain((Order(),))) == "order"


def count_nodes(ir: IR) -> IR:
    return ir.note(nodes=len(ir.gm.graph.nodes), share=torch.tensor(0.5)).note(kind="small")


def note_list(ir: IR) -> IR:
    return ir.note(names=["x"])


def test_a_pass_notes_figures_for_its_step() -> None:
    timer = Timer()
    ir = run_chain(small_ir(), [keep, count_nodes, rename], [timer])
    assert [dict(step.noted) for step in ir.steps] == [{}, {"nodes": 3, "share": 0.5, "kind": "small"}, {}]
    assert [step.run for step in ir.steps] == [keep, count_nodes, rename]
    assert [row["noted"] for row in timer.rows][1] == {"nodes": 3, "share": 0.5, "kind": "small"}
    rows = [line.split() for line in timer.show_noted().splitlines()]
    assert rows[1:] == [
        ["count-nodes", name, value] for name, value in (("nodes", "3"), ("share", "0.5"), ("kind", "small"))
    ]
    with pytest.raises(ChainError, match=r"note\(names=...\) has a list: give a number, a flag or text"):
        run_chain(small_ir(), [note_list])
