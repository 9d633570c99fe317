"""The augment pass by itself: the ideals it finds, and the nodes that join before."""

from __future__ import annotations

import pytest

from fxsplit.errors import ChainError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.passes.augment import Augment
from tests.support.graphs import ir_of, node

# The mask costs nothing, so it may join its reader: then the chain has one ideal less.
COSTS = Costs((node("a"), node("mask", ["a"], 0.0), node("b", ["mask"])), (), ("b",), rows=1)


def test_costless_nodes_join_only_where_devices_are_interchangeable() -> None:
    uneven = Machine((Device("slow"), Device("fast", speed=2.0)), (1e6,))
    assert len(Augment()(ir_of(COSTS))[Antichains]) == 4
    assert len(Augment()(ir_of(COSTS, Machine.planned(2)))[Antichains]) == 3
    assert len(Augment()(ir_of(COSTS, uneven))[Antichains]) == 4


def test_it_needs_room_for_a_state() -> None:
    with pytest.raises(ChainError, match="max_states=0"):
        Augment(max_states=0)
