"""The model's own parts, by the paths of nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxsplit.errors import PlanError
from fxsplit.ir.facts.costs import Costs
from fxsplit.planner.borders import check_modules, find_module, list_modules
from tests.graphs import node


def make(*pairs: tuple[str, str]) -> Costs:
    """Return the costs of a chain of nodes, each with what it calls and the path of its module."""
    nodes = [
        replace(node(f"n{i}", [f"n{i - 1}"] if i else []), op=op, module=module) for i, (op, module) in enumerate(pairs)
    ]
    return Costs(tuple(nodes), (), (nodes[-1].name,), rows=1)


def test_parts_are_children_and_what_their_lists_hold() -> None:
    costs = make(
        ("call_module:embed", "embed"),
        ("get_attr:scale", "scale"),
        ("call_function:mul", "layers.0.inner"),
        ("get_attr:layers.1.weight", "layers.1.weight"),
        ("call_function:mul", "layers.1"),
        ("call_module:blocks.first.norm", "blocks.first.norm"),
        ("call_function:add", ""),
        ("call_module:layers.0", "layers.0"),
    )
    assert [find_module(n) for n in costs.nodes] == [
        "embed", "", "layers.0", "layers.1", "layers.1", "blocks", "", "layers.0"
    ]  # fmt: skip
    names = [n.name for n in costs.nodes]
    assert list_modules(costs) == {
        "embed": (names[0],),
        "layers.0": (names[2], names[7]),
        "layers.1": (names[3], names[4]),
        "blocks": (names[5],),
    }
    check_modules(costs, 4)
    with pytest.raises(PlanError, match=r"has 4 modules .* \(embed, layers.0, layers.1, blocks\), too few for 5"):
        check_modules(costs, 5)
    with pytest.raises(PlanError, match=r"has 0 modules .* \(none\)"):
        check_modules(make(("call_function:add", "")), 1)
