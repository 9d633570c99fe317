"""The state sequence: sums over ideals, and the states just below each."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest

from fxsplit.ir.facts.costs.costs import Costs, InputCost, NodeCost
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.manager import run_chain
from fxsplit.passes import Augment, Order, Partition
from fxsplit.planner import antichains, sequence_states
from tests.planner.lattice.test_lattice import DIAMOND
from tests.support.graphs import ir_of, node, workload


def test_states_of_the_diamond() -> None:
    """Every node takes 1 ms forward and 2 backward; the ideals are {}, a, ac, ab, abc, abcd."""
    states = sequence_states(DIAMOND, antichains(DIAMOND, 100))
    assert states.column("forward_ms").tolist() == [0, 1, 2, 2, 3, 4]
    assert states.column("backward_ms").tolist() == [0, 2, 4, 4, 6, 8]
    assert states.column("live_bytes").tolist() == [16, 1, 5, 3, 6, 8]
    below = [states.in_from[a:b].tolist() for a, b in zip(states.in_pointer, states.in_pointer[1:], strict=False)]
    assert below == [[], [0], [1], [1], [2, 3], [4]]


@pytest.mark.parametrize("max_states", [100_000, 3, 1])
def test_whole_numbers_may_be_larger_than_those_of_numpy(max_states: int) -> None:
    """A profile with 2**70 in it was read, and ended in numpy's own error."""
    whole, given = 2**70, (InputCost("x", 4.0, 0.0),)
    nodes = [node(name, reads) for name, reads in (("a", "x"), ("b", "a"), ("c", "a"), ("d", "bc"), ("e", "d"))]
    last: Any = partial(replace, nodes[4])
    chain, machine = (Augment(max_states=max_states), Order(), Partition()), Machine.of(2)
    for figure in [f.name for f in fields(NodeCost) if f.type == "float" and f.name != "kept_for_bytes"]:
        huge, rounded = (Costs((*nodes[:4], last(**{figure: v})), given, ("e",)) for v in (whole, float(whole)))
        plans = [run_chain(ir_of(costs, machine, workload(machine)), chain)[Plan] for costs in (huge, rounded)]
        assert plans[0].bottleneck_ms == plans[1].bottleneck_ms, figure
        assert [s.nodes for s in plans[0].stages] == [s.nodes for s in plans[1].stages], figure
