"""Shrink an IR on which a pass fails: leave out nodes and facts as long as the pass fails in the same way.

    x -> a -> b -> c -> output        pass `fold` fails on b
    x -> b -> output                  and still does: a reader of the reproducer sees the cause

The nodes are left out in halves, then in quarters, and so on (the algorithm ddmin of Zeller and Hildebrandt, 2002).
Readers of a node that is left out read its first input in its place.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from fxsplit.api.toolkit.parse_ir import parse_ir
from fxsplit.errors import FxsplitError
from fxsplit.ir.facts.costs.costs import Costs, NodeCost
from fxsplit.ir.facts.given.pins import Pins
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.graph import IR, Pass
from fxsplit.ir.manager import run_chain
from fxsplit.ir.text.graph import PlainGraph, PlainNode, map_inside
from fxsplit.ir.text.write import render

LIMIT_S = 60.0
"""The seconds after which the smallest IR so far is the result."""
COMPARED = 100
"""The length of the part of an error's text that must stay the same."""

Fails = Callable[[IR], bool]


def shrink(ir: IR, step: Pass, error: Exception, limit_s: float = LIMIT_S, *, verify: bool = True) -> IR:
    """Return the smallest IR found in `limit_s` seconds on which a pass fails with the kind and the text of `error`.

    `ir` has been read from a file without torch. It comes back as it is if the pass does not fail on it in this way.
    """
    end, wanted = time.monotonic() + limit_s, _sign(error)

    def fails(trial: IR) -> bool:
        if time.monotonic() > end:
            return False
        try:
            # As `fxsplit opt` does with the file; reading verifies every fact.
            read = parse_ir(render(trial), "a smaller reproducer", torch=False)
        except FxsplitError:
            return False
        try:
            run_chain(read, [step], verify=verify)
        except Exception as raised:
            return _sign(raised) == wanted
        return False

    if not fails(ir):
        return ir
    # Without its plan, an IR may lack more nodes.
    return _drop_nodes(_drop_facts(_drop_nodes(ir, fails), fails), fails)


def _sign(error: Exception) -> tuple[str, str]:
    """Return the kind of an error, and the head of its text without numbers: fewer nodes may change a number."""
    return type(error).__name__, re.sub(r"\b\d[\d.]*\b", "_", str(error))[:COMPARED]


def _drop_facts(ir: IR, fails: Fails) -> IR:
    """Return the IR with as few facts and steps as the failure needs."""
    for kind in reversed([*ir.facts]):
        trial = replace(ir, facts={k: f for k, f in ir.facts.items() if k is not kind})
        ir = trial if fails(trial) else ir
    trial = replace(ir, steps=())
    return trial if fails(trial) else ir


def _drop_nodes(ir: IR, fails: Fails) -> IR:
    """Return the IR with as few nodes as the failure needs."""
    size = len(ir.gm.graph.nodes)
    while size > 1:
        size = (size + 1) // 2
        names = [node.name for node in ir.gm.graph.nodes if node.op != "output"]
        # From the end: what no other node reads is left out at once.
        for at in reversed(range(0, len(names), size)):
            trial = _leave_out(ir, names[at : at + size])
            ir = trial if trial is not None and fails(trial) else ir
    return ir


def _leave_out(ir: IR, names: Collection[str]) -> IR | None:
    """Return the IR without some nodes, in its graph and its facts; None if the facts do not allow it."""
    before = cast(PlainGraph, ir.gm)
    graph, instead = _cut_graph(before, set(names))
    gone = {node.name for node in before.nodes} - {node.name for node in graph.nodes}
    facts: dict[type, Any] = dict(ir.facts)
    plan = facts.pop(Plan, None)
    if Costs in facts:
        facts[Costs] = _cut_costs(facts[Costs], gone, instead)
    if Pins in facts:
        facts[Pins] = replace(facts[Pins], stages={n: s for n, s in facts[Pins].stages.items() if n not in gone})
    trial = replace(ir, gm=cast(Any, graph), facts=facts)
    if plan is None:
        return trial if gone else None
    try:
        return trial.learn(Plan.of(trial, {n: s for n, s in plan.stage_of().items() if n not in gone}))
    except FxsplitError:
        return None


def _cut_graph(graph: PlainGraph, names: Collection[str]) -> tuple[PlainGraph, dict[str, str]]:
    """Return a graph without the nodes in `names`, and the node that stands for each of them.

    A node without inputs stays as long as another node reads it.
    """
    kept: dict[PlainNode, PlainNode] = {}

    def convert(value: Any) -> Any:
        return kept[value] if isinstance(value, PlainNode) else map_inside(value, convert)

    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.name in names and inputs and node.op != "output":
            kept[node] = kept[inputs[0]]
        else:
            kept[node] = replace(node, args=convert(node.args), kwargs=convert(node.kwargs))
    made = list(dict.fromkeys(kept.values()))
    readers = Counter(value for node in made for value in node.all_input_nodes)
    for node in reversed(made):
        if node.name in names and node.op != "output" and not readers[node]:
            readers.subtract(node.all_input_nodes)
            made.remove(node)
    return PlainGraph(graph.name, made), {node.name: stands.name for node, stands in kept.items()}


def _cut_costs(costs: Costs, gone: Collection[str], instead: Mapping[str, str]) -> Costs:
    """Return costs without some nodes; `instead` names the node that stands for each of them."""

    def rename(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(instead[name] for name in names if instead[name] not in gone))

    def keep(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name not in gone)

    def cut(node: NodeCost) -> NodeCost:
        late = {"kept_for": "", "kept_for_bytes": 0.0} if node.kept_for in gone else {}
        view = {"lies_in": ""} if node.lies_in in gone else {}
        return replace(node, inputs=rename(node.inputs), **cast(Any, late | view))

    together = (keep(group) for group in costs.together)
    exchanges = (replace(each, nodes=keep(each.nodes)) for each in costs.exchanges)
    tied = (replace(each, nodes=keep(each.nodes)) for each in costs.tied)
    return replace(
        costs,
        nodes=tuple(cut(node) for node in costs.nodes if node.name not in gone),
        inputs=tuple(given for given in costs.inputs if given.name not in gone),
        outputs=rename(costs.outputs),
        together=tuple(group for group in together if len(group) > 1),
        ordered=tuple((a, b) for a, b in costs.ordered if not {a, b} & {*gone}),
        exchanges=tuple(each for each in exchanges if len(each.nodes) > 1),
        tied=tuple(each for each in tied if len(each.nodes) > 1),
    )
