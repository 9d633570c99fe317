"""A small model with modules for tests of reports: three layers of two nodes each, and a head."""

from __future__ import annotations

from dataclasses import replace

import fxsplit
from fxsplit.ir.facts.costs.costs import Costs, InputCost, NodeCost
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import Plan
from tests.support.graphs import node


def _make_nodes() -> list[NodeCost]:
    found: list[NodeCost] = []
    before = "x"
    for layer in range(3):
        linear = node(f"linear_{layer}", [before], 2.0, output_bytes=4000.0, gradient_bytes=4000.0)
        relu = node(f"relu_{layer}", [linear.name], 0.5, output_bytes=1000.0, gradient_bytes=1000.0)
        module = f"layers.{layer}"
        found += [
            replace(linear, module=module, op=f"call_module:{module}", parameter_bytes=1000.0),
            replace(relu, module=module, op="call_function:relu"),
        ]
        before = relu.name
    head = node("head", [before], 1.0, output_bytes=40.0, gradient_bytes=40.0)
    return [*found, replace(head, module="head", op="call_module:head")]


COSTS = Costs(tuple(_make_nodes()), (InputCost("x", 400.0, 0.0),), ("head",), rows=2)


def make_plan() -> Plan:
    """Return the best plan for two devices with 40,000 bytes each."""
    machine = Machine.planned(2, bytes_per_s=1e6, memory_bytes=40_000.0)
    return fxsplit.plan(COSTS, machine, n_microbatches=4)
