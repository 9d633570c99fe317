"""Moves over devices, written out for machines small enough to count by hand."""

from __future__ import annotations

from math import inf

import pytest

from fxsplit.errors import PlanError
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.planner.problem.moves import Moves, list_moves, powers


def arrows(found: Moves) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(m.source, m.target, m.devices) for m in found.moves]


def of(machine: Machine, n_stages: int | None = None, recompute: str = "never", **options: bool) -> Moves:
    chosen = {"replicated": False, "use_all": True, "free": False} | options
    return list_moves(
        machine, chosen["replicated"], "none" if chosen["use_all"] else "last", chosen["free"], n_stages, recompute
    )


def test_in_the_order_of_the_machine() -> None:
    found = of(Machine.planned(2))
    assert arrows(found) == [(0, 1, (0,)), (1, 2, (1,))] and found.final == {2}
    assert [(m.first, m.last) for m in found.moves] == [(True, False), (False, True)]
    assert of(Machine.planned(2), use_all=False).final == {1, 2}


def test_any_device_may_be_left_out() -> None:
    """Only the last devices could stay idle, so a slow one in front had to have a stage."""
    alike = list_moves(Machine.planned(3), False, "any", False, None)
    assert arrows(alike) == [
        (0, 1, (0,)),
        (0, 1, ()),
        (1, 2, (1,)),
        (1, 2, ()),
        (2, 3, (2,)),
    ]
    assert alike.final == {1, 2, 3}
    # A device that something is pinned to has a stage.
    assert arrows(list_moves(Machine.planned(2), False, "any", False, None, named=frozenset({0}))) == [
        (0, 1, (0,)),
        (1, 2, (1,)),
    ]


def test_links_to_devices_that_are_no_neighbours() -> None:
    """The sending time of a stage depends on whether the next device is left out."""
    three = Machine((Device("a"), Device("b"), Device("c")), (1e6, 1e3))
    found = list_moves(three, False, "any", False, None)
    told = {(m.devices, m.first, m.near_before, m.near_after) for m in found.moves if m.devices == (0,)}
    assert told == {((0,), True, True, True), ((0,), True, True, False)}
    last = {(m.first, m.near_before) for m in found.moves if m.devices == (2,)}
    assert last == {(True, True), (False, True), (False, False)}
    entered = {0}
    for move in found.moves:
        assert move.source in entered, "a configuration is left before it is entered"
        entered.add(move.target)
    counted = list_moves(three, False, "any", False, 2)
    assert {m.devices for m in counted.moves if m.last} == {(1,), (2,)}


def test_replicas_take_neighbours_and_no_hosts() -> None:
    assert arrows(of(Machine.planned(2), replicated=True)) == [(0, 1, (0,)), (0, 2, (0, 1)), (1, 2, (1,))]
    with_host = Machine((Device("d"), Device("h", host=True)), (inf,))
    assert arrows(of(with_host, replicated=True)) == [(0, 1, (0,)), (1, 2, (1,))]


def test_a_free_order_counts_equal_devices() -> None:
    three = Machine((Device("a"), Device("b"), Device("fast", speed=2.0)), (inf, inf))
    found = of(three, free=True)
    assert found.used == ((), (2,), (0,), (0, 2), (0, 1), (0, 1, 2)) and found.final == {5}
    entered = {0}
    for move in found.moves:
        assert move.source in entered, "a configuration is left before it is entered"
        entered.add(move.target)
    with pytest.raises(PlanError, match="equal links"):
        of(Machine(three.devices, (1e6, 1e7)), free=True)


def test_pinned_devices_are_like_no_others() -> None:
    named = list_moves(Machine.planned(2), False, "none", True, None, "never", frozenset({1}))
    assert len(named.used) == 4 and len(of(Machine.planned(2), free=True).used) == 3


def test_a_number_of_stages_numbers_them() -> None:
    found = of(Machine.planned(3), n_stages=2, use_all=False)
    assert [(m.devices, m.rank, m.first, m.last) for m in found.moves] == [
        ((0,), 0, True, False),
        ((1,), 1, False, True),
    ]
    assert found.n_stages == 2 and [found.used[q] for q in found.final] == [(0, 1)]
    assert not of(Machine.planned(3), n_stages=2).final, "two stages cannot use three devices, one each"


def test_recomputing_doubles_the_moves() -> None:
    assert [m.recompute for m in of(Machine.planned(1), recompute="auto").moves] == [False, True]
    assert [m.recompute for m in of(Machine.planned(1), recompute="always").moves] == [True]


def test_powers_add_up_speeds() -> None:
    machine = Machine((Device("a", speed=0.5), Device("h", speed=2.0, host=True)), (inf,))
    assert powers(machine, of(machine), 10.0) == ([0.0, 0.5, 20.5], [20.5, 20.0, 0.0])
