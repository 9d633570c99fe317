"""Costs between two microbatch sizes: linear in the rows, and only of one model."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit.errors import ProfileError
from fxsplit.ir.facts.costs.costs import Costs, InputCost, NodeCost
from fxsplit.ir.facts.costs.estimated import Estimated
from fxsplit.ir.facts.costs.interpolate import check_one_model, interpolate_costs
from fxsplit.ir.facts.costs.loss import LossCost
from tests.support.graphs import node, profiles, try_examples

WEIGHTS = ("parameter_bytes", "buffer_bytes")


def at(rows: int, **changes: Any) -> Costs:
    """A model of two layers: times and values grow with the rows, and weights do not."""
    first = node("a", ["x"], 1.0 + rows, backward_ms=2.0 * rows, weight_ms=1.0 * rows, parameter_bytes=64)
    grown: dict[str, Any] = {"output_bytes": 32 * rows, "kept_bytes": 8 * rows, "made": f"float32[{rows}, 8]"}
    first = replace(first, **(grown | changes))
    inputs = (InputCost("x", 16 * rows, 0, f"float32[{rows}, 4]"),)
    nodes = (first, node("b", ["a"], 0.5, backward_ms=0.5))
    return Costs(nodes, inputs, ("b",), rows=rows, loss=LossCost(4.0 * rows, 2.0, 2.0))


@pytest.mark.parametrize("rows", [3, 4, 5, 7])
def test_a_model_that_is_linear_in_its_rows_is_hit_exactly(rows: int) -> None:
    found, true = interpolate_costs(at(2), at(8), rows), at(rows)
    for mine, its in zip(found.nodes, true.nodes, strict=True):
        assert {k: pytest.approx(v) for k, v in vars(its).items() if k != "signature"} == {
            k: v for k, v in vars(mine).items() if k != "signature"
        }
    assert found.inputs[0].output_bytes == pytest.approx(16 * rows) and found.inputs[0].made == f"float32[{rows}, 4]"
    assert found.loss is not None and found.loss.kept_bytes == pytest.approx(4.0 * rows) and found.rows == rows


@given(profiles(5), st.data(), st.integers(2, 20))
def costs_between_are_valid_and_between(costs: Costs, data: st.DataObject, rows: int) -> None:
    def other(n: NodeCost) -> NodeCost:
        names = [f.name for f in fields(n) if f.type == "float" and f.name not in WEIGHTS]
        scale = data.draw(st.floats(0.1, 9.0))
        return replace(n, **{name: scale * getattr(n, name) for name in names})

    lower, higher = replace(costs, rows=1), replace(costs, rows=21, nodes=tuple(map(other, costs.nodes)))
    check_one_model([lower, higher], ["lower", "higher"])
    found = interpolate_costs(lower, higher, rows)
    found.check()
    for a, b, mine in zip(lower.nodes, higher.nodes, found.nodes, strict=True):
        assert mine.late_ms <= mine.backward_ms and mine.parameter_bytes == a.parameter_bytes
        low, high = sorted((a.forward_ms, b.forward_ms))
        assert low * (1 - 1e-12) <= mine.forward_ms <= high * (1 + 1e-12)


def test_costs_between_are_valid_and_between() -> None:
    try_examples(100)(costs_between_are_valid_and_between)()


def test_a_figure_that_one_profile_lacks_is_unknown() -> None:
    found = interpolate_costs(at(2), at(8, weight_ms=None), 4)
    assert found.nodes[0].weight_ms is None
    # The memory is kept for different nodes: it counts for longer.
    kept = interpolate_costs(at(2, kept_for="b", kept_for_bytes=8), at(8, kept_bytes=9), 4).nodes[0]
    assert (kept.kept_for, kept.kept_for_bytes) == ("", 0.0)
    assert interpolate_costs(at(2), at(8, made="float64[8, 8]"), 4).nodes[0].made == ""


REFUSED: list[tuple[Costs, str]] = [
    (at(8, name="c"), r"'other' is not a profile of the model in 'first': .*name of node 0 is 'a' there and 'c' here"),
    (at(8, op="call_module torch.nn.Tanh"), "op of node 'a' is"),
    (at(8, parameter_bytes=65), "parameter_bytes of node 'a' is 64 there and 65 here; give profiles of one model"),
    (replace(at(8), nodes=at(8).nodes[:1], outputs=("b",)), "there are 2 nodes there and 1 here"),
    (replace(at(8), outputs=("a",)), "the outputs are"),
    (replace(at(8), device_kind="cuda"), "measure both on one device"),
    (
        replace(at(8), estimated=Estimated("h100", "1", "float32")),
        r"'other' is of device h100 \(estimated for float32\), and 'first' of device cpu: measure both on one device",
    ),
    (replace(at(8), inference=True), "measure both for training"),
    (at(2), "'first' and 'other' are both of microbatches of 2 rows: give one of them"),
    (replace(at(8), rows=0), "'other' does not say how many rows its microbatch has"),
]


@pytest.mark.parametrize(("other", "message"), REFUSED)
def test_profiles_that_are_not_of_one_model_are_refused_by_name(other: Costs, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        check_one_model([at(2), other], ["first", "other"])
