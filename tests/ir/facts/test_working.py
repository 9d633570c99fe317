"""What a stage needs while it runs, by hand."""

from __future__ import annotations

from fxsplit import Machine
from fxsplit.ir.facts.costs import Costs, InputCost
from fxsplit.ir.facts.forward_costs import keep_forwards
from fxsplit.ir.facts.price import CostModel, price_split
from fxsplit.ir.facts.working import find_working_bytes, list_rooms
from fxsplit.ir.facts.workload import Workload
from tests.graphs import node, one_each


def chain() -> Costs:
    """Return a chain of three nodes, of which the first and the last keep what they make."""
    sizes = {"output_bytes": 4, "gradient_bytes": 4, "forward_peak_bytes": 4, "backward_peak_bytes": 4}
    nodes = (
        node("a", ["x"], kept_bytes=4, **sizes),
        node("b", ["a"], unkept_bytes=4, **sizes | {"backward_peak_bytes": 9}),
        node("c", ["b"], kept_bytes=4, parameter_bytes=3, handed_bytes=3, **sizes),
    )
    return Costs(nodes, (InputCost("x", 2, 0),), ("c",), rows=1)


def test_a_node_has_what_is_there_beside_what_it_allocates() -> None:
    rooms = list_rooms(chain())
    # The backward of a: its own gradient, and what it allocates. Of b likewise. The gradient of c is given.
    assert [room.near_bytes for room in rooms.values()] == [4 + 4, 4 + 9, 4]
    assert [room.far_bytes for room in rooms.values()] == [8 + 4, 13 + 4, 4 + 8]


def test_activations_behind_a_node_are_freed_when_it_runs_backward() -> None:
    names = ["a", "b", "c"]
    assert find_working_bytes(chain(), names, [], 0, splits=False) == 13 + 4 - 8, "those of c are gone"
    assert find_working_bytes(chain(), names, [], 4, splits=False) == 13, "c hands its own on"
    assert find_working_bytes(chain(), names, [], 0, splits=True) == 13, "half a backward frees nothing"
    assert find_working_bytes(chain(), ["c"], ["a", "b"], 0, splits=False) == 4
    assert find_working_bytes(chain(), [], names, 0, splits=False) == 0


def test_memory_is_the_sum_of_its_kinds() -> None:
    load = Workload("1F1B", 4, {2: (2, 1)})
    split = one_each([("a", "b"), ("c",)])
    first, last = price_split(chain(), Machine.planned(2), load, split, CostModel())
    assert first.memory_kinds == {
        "parameters": 0, "gradients": 0, "optimizer": 0, "buffers": 0,
        "activations": 2 * 4, "boundaries": 2 * (2 + 4), "working": 13 + 4,
    }  # fmt: skip
    # The output is kept, and by the loss once more, which allocates it a third time.
    assert last.memory_kinds == {
        "parameters": 3, "gradients": 3, "optimizer": 6, "buffers": 0,
        "activations": 4, "boundaries": 4 + 4, "working": 4 + 4 + 4 + 3,
    }  # fmt: skip
    for stage in (first, last):
        assert sum(stage.memory_kinds.values()) == stage.memory_bytes


def test_forwards_alone_have_values_and_what_one_node_allocates() -> None:
    rooms = list_rooms(keep_forwards(chain()))
    assert [room.near_bytes for room in rooms.values()] == [4, 4 + 4, 4 + 4]


def test_what_was_not_measured_is_not_counted() -> None:
    costs = Costs((node("a", ["x"], output_bytes=4, gradient_bytes=4, kept_bytes=4),), (InputCost("x", 2, 0),), ("a",))
    assert not costs.weighed and find_working_bytes(costs, ["a"], [], 0, splits=False) == 0
    (stage,) = price_split(costs, Machine.planned(1), Workload("1F1B", 4, {1: (1,)}), one_each([("a",)]), CostModel())
    assert stage.memory_bytes == 4 + 2 + 4
