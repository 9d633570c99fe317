"""The costs of only the forward passes."""

from __future__ import annotations

from dataclasses import replace

from fxsplit.ir.facts.costs.costs import Costs, Exchange, InputCost
from fxsplit.ir.facts.costs.forwards import keep_forwards
from tests.support.graphs import node


def test_what_training_takes_alone_is_left_out() -> None:
    figures = {"parameter_bytes": 40, "buffer_bytes": 2, "kept_bytes": 5, "output_bytes": 7, "gradient_bytes": 7}
    made = [
        replace(
            node(f"n{i}", [f"n{i - 1}"] if i else ["x"], 1.0, **figures),
            host_ms=30.0,
            backward_launch_ms=1.0,
            spread_ms=0.3,
        )
        for i in range(2)
    ]
    costs = Costs(tuple(made), (InputCost("x", 3.0, 3.0),), ("n1",), exchanges=(Exchange(9.0, ("n0", "n1")),))
    found = keep_forwards(costs)
    found.check()
    assert found.inference and not costs.inference and keep_forwards(found) is found
    share = made[0].forward_ms / (made[0].forward_ms + made[0].backward_ms)
    for mine, its in zip(found.nodes, made, strict=True):
        assert mine == replace(
            its,
            backward_ms=0.0,
            backward_launch_ms=0.0,
            weight_ms=0.0,
            gradient_bytes=0.0,
            kept_bytes=0.0,
            parameter_bytes=0.0,
            buffer_bytes=42.0,
            host_ms=30.0 * share,
            spread_ms=0.3 * share,
        )
    assert found.inputs == (InputCost("x", 3.0, 0.0),) and found.exchanges == ()


def test_a_node_without_times_keeps_its_time_on_a_host() -> None:
    costs = Costs((replace(node("n0", [], 0.0), forward_ms=0.0, backward_ms=0.0, host_ms=4.0),), (), ("n0",))
    assert keep_forwards(costs).nodes[0].host_ms == 4.0
