"""The lattice of ideals, on the graph of four nodes that the planner's introduction explains."""

from __future__ import annotations

import pytest

from fxsplit.ir.facts.costs.costs import Costs, InputCost
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.planner.lattice.lattice import antichains, enumerate_ideals
from tests.support.graphs import node

DIAMOND = Costs(
    (
        node("a", ["x"], output_bytes=1, gradient_bytes=100),
        node("b", ["a"], output_bytes=2),
        node("c", ["a"], output_bytes=4),
        node("d", ["b", "c"], output_bytes=8),
    ),
    (InputCost("x", 16, 0),),
    ("d",),
    rows=1,
)


def test_ideals_of_the_diamond() -> None:
    """In the order of their enumeration, each with its augmented antichain, live bytes and live gradients."""
    chains = antichains(DIAMOND, 100)
    found = [
        ("".join(chains.names(i)), "".join("abcd"[b] for b in chains.antichain(i)), live, gradient)
        for i, (live, gradient) in enumerate(zip(chains.live_bytes, chains.live_gradient_bytes, strict=True))
    ]
    assert found == [
        ("", "", 16, 0),
        ("a", "a", 1, 100),
        ("ac", "ac", 1 + 4, 100),
        ("ab", "ab", 1 + 2, 100),
        ("abc", "bc", 2 + 4, 0),
        ("abcd", "d", 8, 0),
    ]
    assert chains.complete and not chains.joined


def test_too_many_ideals_leave_one_order() -> None:
    chains = antichains(DIAMOND, 5)
    assert not chains.complete and ["".join(chains.names(i)) for i in range(len(chains))] == [
        "",
        "a",
        "ab",
        "abc",
        "abcd",
    ]


def test_costless_nodes_join_and_are_named() -> None:
    costs = Costs((node("a"), node("free", ["a"], 0.0), node("b", ["free"])), (), ("b",), rows=1)
    machine = Machine.planned(2)
    joined = enumerate_ideals(costs, machine, {}, 77, join=True)
    assert len(joined.blocks) == 2 and "free" in joined.joined and len(joined.joined) == 2 and joined.max_states == 77
    assert enumerate_ideals(costs, machine, {"free": 0}, 77, join=True).joined == frozenset()
    assert len(enumerate_ideals(costs, machine, {}, 77, join=False).blocks) == 3
    assert len(enumerate_ideals(costs, None, {}, 77, join=False).blocks) == 3


def test_one_order_follows_the_pins() -> None:
    """Of two nodes without inputs the second one is pinned to the first device: the order of the graph has no plan."""
    costs = Costs((node("late"), node("early"), node("sum", ["late", "early"])), (), ("sum",), rows=1)
    chains = enumerate_ideals(costs, Machine.planned(2), {"late": 1, "early": 0}, 1, join=False)
    assert not chains.complete and [set(chains.names(i)) for i in (1, 3)] == [{"early"}, {"early", "late", "sum"}]
    # On devices in another order these pins may hold, and say nothing of the order of nodes.
    chains = enumerate_ideals(costs, Machine.planned(2), {"late": 1, "early": 0, "sum": 0}, 1, join=False)
    assert set(chains.names(1)) == {"late"}


def test_very_many_devices_get_fewer_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of devices times ideals filled the memory."""
    costs = Costs(tuple(node(f"n{i}") for i in range(8)), (), ())
    assert len(enumerate_ideals(costs, Machine.planned(4), {}, 1000, join=False)) == 256
    monkeypatch.setattr("fxsplit.planner.lattice.lattice.MOST_CELLS", 4 * 200)
    fewer = enumerate_ideals(costs, Machine.planned(4), {}, 1000, join=False)
    assert len(fewer) == 9 and not fewer.complete
