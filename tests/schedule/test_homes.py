"""The devices of stages, by every rule."""

from __future__ import annotations

from fxsplit.schedule.homes import cross_both_ways, deal_in_turn, go_there_and_back, group_in_blocks, line


def test_the_rules() -> None:
    assert line(3) == ((0,), (1,), (2,))
    assert deal_in_turn(2, 2) == ((0,), (1,), (0,), (1,)) and deal_in_turn(3, 1) == line(3)
    assert go_there_and_back(3) == ((0,), (1,), (2,), (2,), (1,), (0,))
    assert cross_both_ways(4) == ((0, 3), (1, 2), (2, 1), (3, 0))
    assert group_in_blocks([2, 1]) == ((0,), (0,), (1,)) and group_in_blocks([0, 1]) == ((1,),)
