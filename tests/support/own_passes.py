"""Passes that a user might write, for tests of chains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import fxsplit
from fxsplit.ir.facts.given.pins import Pins
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import CostModel, price_split
from fxsplit.ir.graph import IR


def fold_conv_bn(ir: IR) -> IR:
    """Fold each batch norm into the convolution before it; right in eval mode only."""
    graph, made = copied(ir.gm.graph)
    gm = fx.GraphModule(ir.gm, graph)
    for old in ir.gm.graph.nodes:
        source = old.args[0] if old.args else None
        if not (old.op == "call_module" and isinstance(source, fx.Node) and source.op == "call_module"):
            continue
        conv, bn = ir.gm.get_submodule(str(source.target)), ir.gm.get_submodule(str(old.target))
        if isinstance(conv, nn.Conv2d) and isinstance(bn, nn.BatchNorm2d) and len(source.users) == 1:
            name = f"folded_{source.name}"
            gm.add_module(name, fuse_conv_bn_eval(conv, bn))
            made[source].target = name
            made[old].replace_all_uses_with(made[source])
            graph.erase_node(made[old])
    gm.recompile()
    return ir.rewrite(gm)


@dataclass(frozen=True)
class Keep:
    """Keep a submodule on one device."""

    module: str = ""
    device: int = 0

    name: ClassVar[str] = "keep"

    def __call__(self, ir: IR) -> IR:
        return Pins.add(ir, {self.module: self.device})


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return a copy of a graph, which a pass may edit, and the copy of each node."""
    copy = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    copy.output(copy.graph_copy(graph, made))
    return copy, made


def fold_in_evaluation(ir: IR) -> IR:
    """Fold batch norms like fold_conv_bn, but only in evaluation, where that is right."""
    return fold_conv_bn(ir) if ir.mode == "eval" else ir


def swap(wanted: Any, given: Any, keep: bool = True) -> fxsplit.Pass:
    """Return a pass that replaces calls of the function `wanted` by `given`, and keeps all facts or only the plan."""

    def swap_function(ir: IR) -> IR:
        graph, made = copied(ir.gm.graph)
        for node in made.values():
            if node.target is wanted:
                node.target, node.kwargs = given, {}
        return ir.rewrite(fx.GraphModule(ir.gm, graph), *(ir.facts if keep else [Plan]))

    return swap_function


def partition_over_replicas(counts: Sequence[int]) -> fxsplit.Pass:
    """Return a partitioner that makes stages of equally many nodes, and gives counts[i] devices to stage i."""

    def partition(ir: IR) -> IR:
        costs, machine, workload = ir[fxsplit.Costs], ir[fxsplit.Machine], ir[Workload]
        names = [n.name for n in costs.nodes]
        whole = [{names.index(name) for name in together} for together in costs.together]
        legal = [k for k in range(1, len(names)) if not any(min(c) < k <= max(c) for c in whole)]
        ends = [*(legal[len(legal) * i // len(counts)] for i in range(1, len(counts))), len(names)]
        first = [sum(counts[:i]) for i in range(len(counts))]
        split = [
            (names[a:b], tuple(range(d, d + r)), False)
            for a, b, d, r in zip([0, *ends], ends, first, counts, strict=False)
        ]
        model = CostModel("replicated")
        priced = price_split(costs, machine, workload, split, model)
        slowest = max(s.load_ms for s in priced)
        devices = tuple(d.name for d in machine.devices)
        count = workload.n_microbatches
        return ir.learn(Plan(priced, devices, slowest, costs.total_ms, "1F1B", count, 2, 1, model))

    return partition
