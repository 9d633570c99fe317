"""Tables of costs and plans use the names of the user's model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxsplit import Costs, Machine, plan
from fxsplit.formats.plan_json import parse_plan, plan_to_dict
from fxsplit.ir.facts.costs.text import sum_by_module
from tests.support.graphs import node


def make_costs(n_layers: int) -> Costs:
    """Return costs of an embedding, layers of an attention (two nodes) and an MLP, and the model's own last node."""
    rows = [("embed", "call_module:embed", "embed", 1.0)]
    for i in range(n_layers):
        rows.append((f"linear_{2 * i}", "call_function:linear", f"layers.{i}.attn", 2.0))
        rows.append((f"weight_{i}", f"get_attr:layers.{i}.mlp.w", f"layers.{i}.mlp.w", 0.0))
        rows.append((f"linear_{2 * i + 1}", "call_function:linear", f"layers.{i}.mlp", 4.0))
    rows.append(("add", "call_function:add", "", 1.0))
    nodes, before = [], None
    for name, op, module, forward in rows:
        made = node(name, [] if before is None else [before], forward)
        nodes.append(replace(made, op=op, module=module))
        before = name
    return Costs(tuple(nodes), (), ("add",), rows=1)


def test_a_node_is_named_by_its_module_and_by_itself_if_it_is_a_part() -> None:
    assert [n.place for n in make_costs(1).nodes] == [
        "embed",
        "layers.0.attn (linear_0)",
        "layers.0.mlp.w",
        "layers.0.mlp (linear_1)",
        "add",
    ]


def test_a_plan_names_modules_and_so_does_its_file() -> None:
    found = plan(make_costs(2), 2)
    assert "embed .. layers.0.mlp (linear_1)" in str(found) and "layers.1.attn (linear_2) .. layers" in str(found)
    read = parse_plan(plan_to_dict(found), "plan.json")
    assert str(read) == str(found)
    # A file of an earlier version only has the names of nodes.
    told = plan_to_dict(found)
    for stage in told["stages"]:
        del stage["begins_at"], stage["ends_at"]
    assert "embed .. linear_1" in str(parse_plan(told, "plan.json"))


def test_layers_that_repeat_are_summed_and_most_of_the_whole_is_divided() -> None:
    found = sum_by_module(make_costs(8).nodes, 9)
    assert {name: len(held) for name, held in found.items()} == {
        "layers.*.mlp": 16,
        "layers.*.attn": 8,
        "add": 1,
        "embed": 1,
    }
    # A single layer has no repetition to summarise.
    assert list(sum_by_module(make_costs(1).nodes, 2)) == ["layers.0.mlp", "layers.0.attn"]
    assert sum_by_module([], 3) == {}


@pytest.mark.parametrize(("n_layers", "head"), [(3, "node"), (30, "module")])
def test_few_nodes_are_shown_and_of_many_the_largest_modules(n_layers: int, head: str) -> None:
    costs = make_costs(n_layers)
    shown = str(costs).splitlines()
    assert shown[0].split()[0] == head and max(map(len, shown)) <= 80
    assert len(costs.dumped.splitlines()) >= len(costs.nodes) + 1, "a dump has every node"
    assert repr(costs) == f"Costs({len(costs.nodes)} nodes, {costs.compute_ms:.3f} ms for a microbatch of 1 row)"


def test_a_machine_is_a_table() -> None:
    machine = Machine.planned(2)
    assert repr(machine) == "Machine(2 devices: device0, device1)"
    assert str(machine).splitlines()[1].split() == ["device0", "planned", "for", "unlimited", "1", *["unlimited"] * 2]
