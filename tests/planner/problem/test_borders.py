"""The model's own parts, by the paths of nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxsplit.errors import PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.planner.problem.borders import check_modules, check_place, find_module, list_modules, list_wholes
from tests.support.graphs import node


def make(*pairs: tuple[str, str]) -> Costs:
    """Return the costs of a chain of nodes, each with its operator and the path of its module."""
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


LLAMA = make(
    ("call_function:embedding", "model.embed"),
    ("call_function:cos", "model"),
    ("call_function:linear", "model.layers.0.attn"),
    ("get_attr:model.layers.0.mlp.w", "model.layers.0.mlp.w"),
    ("call_function:linear", "model.layers.0.mlp"),
    ("call_function:add", "model"),
    ("call_function:linear", "model.layers.1.attn"),
    ("call_function:linear", "model.layers.1.mlp"),
    ("call_function:norm", "model.norm"),
    ("call_function:linear", "head"),
)


def spell(at: str, costs: Costs = LLAMA) -> list[str]:
    """Return the numbers of the nodes of each part that is to stay whole."""
    return ["".join(name.removeprefix("n") for name in names) for names in list_wholes(costs, at).values()]


def test_places_by_depth_and_by_pattern() -> None:
    assert spell("anywhere") == []
    assert spell("modules") == spell("modules=1") == ["012345678", "9"]
    assert spell("modules=2") == ["0", "234", "67", "8", "9"], "what the model's forward computes may lie anywhere"
    assert spell("modules=3") == ["0", "2", "34", "6", "7", "8", "9"]
    # For a pattern, nodes between two modules stay whole too: the add between the layers, the norm with the head.
    assert spell("model.layers.*") == ["01", "234", "5", "67", "89"]
    assert spell("model.layers.1") == ["012345", "67", "89"]
    assert spell("model.layers.*.mlp") == ["012", "34", "56", "7", "89"]
    assert spell("*.norm") == ["01234567", "8", "9"]


def test_what_no_module_leads_to_may_lie_anywhere() -> None:
    """The labels of a loss have nothing to do before it, and would cross every cut."""
    labels = replace(node("labels", []), op="call_method:view")
    loss = replace(node("loss", ["n9", "labels"]), op="call_function:loss")
    costs = replace(LLAMA, nodes=(*LLAMA.nodes, labels, loss), outputs=("loss",))
    assert "labels" not in {name for names in list_wholes(costs, "model.layers.*").values() for name in names}
    assert spell("model.layers.*", costs)[-1] == "89loss"


@pytest.mark.parametrize(
    ("at", "meant"),
    [
        ("model.layer.*", "'model.layers.*'"),
        ("layers.*", "'model.layers.*'"),
        ("moduls", "'modules'"),
        ("modle.norm", "'model.norm'"),
    ],
)
def test_a_pattern_that_matches_nothing_names_the_nearest_paths(at: str, meant: str) -> None:
    with pytest.raises(PlanError, match="no module matches") as caught:
        list_wholes(LLAMA, at)
    assert meant in str(caught.value).partition("did you mean ")[2]


def test_places_that_are_none() -> None:
    for at in ("", "modules=", "modules=0", "modules=two", "modules=100", "a..b", "a.{b}"):
        with pytest.raises(ValueError, match="give anywhere, modules, "):
            check_place(at)
    with pytest.raises(PlanError, match=r"has 2 modules .* \(model.layers.0, model.layers.1\), too few for 6"):
        check_modules(LLAMA, 6, "model.layers.*")
    check_modules(LLAMA, 5, "model.layers.*")
