"""Starts: orders that a search begins with have every action once, and run."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from fxsplit.schedule import Times, generate
from fxsplit.schedule.generators.fill import evaluate, read_kinds
from fxsplit.schedule.homes import deal_in_turn, go_there_and_back, line
from fxsplit.schedule.kernels.instance import make_instance
from fxsplit.schedule.kernels.orders import NEVER
from fxsplit.schedule.solver.heads import find_heads
from fxsplit.schedule.solver.starts import list_low_memory_starts, list_repeating_starts, list_starts
from tests.support.exact_schedules import draw, make_arrays


@pytest.mark.parametrize("placement", ["line", "v", "loop"])
def test_orders_have_every_action_once(placement: str) -> None:
    for seed in range(15):
        x = draw(Random(f"starts {placement}{seed}"), placement, 4)
        one = make_arrays(x)
        kinds = 2 * one.stages.shape[1]
        found = [*list_starts(one, placement == "v"), *list_low_memory_starts(one)]
        if kinds == 4:
            found += list_repeating_starts(one, find_heads(one).head)
        assert len(found) > 3
        for order in found:
            assert order.dtype == np.int64
            assert (np.sort(order, axis=1) == np.repeat(np.arange(kinds), x.n)).all()
        # One microbatch after another fits any memory that one microbatch fits.
        steps = [evaluate(one, order, np.zeros(order.shape))[0] for order in found]
        assert min(steps) < NEVER


def test_lines_begin_with_the_orders_of_named_schedules() -> None:
    one = make_instance(line(4), 8, Times.unit(4))
    first = [order.tolist() for order in list_starts(one, v_shaped=False)]
    for at, name in ((0, "1F1B"), (0, "ZB-H1")):
        assert first[at] == read_kinds(one, generate(name, 4, 8).actions).tolist()
    # Then those with more forwards at the beginning: 2 (p - r) - 1, and 2 p - r.
    warm = [[row.index(1) for row in order] for order in first[:3]]
    assert warm == [[4, 3, 2, 1], [7, 5, 3, 1], [8, 7, 6, 5]]
    tight = make_instance(line(4), 8, Times.unit(4), memory=[3, 2, 1, 1])
    assert [row.index(1) for row in next(list_starts(tight, v_shaped=False)).tolist()] == [3, 2, 1, 1]
    held = make_instance(line(2), 8, Times.unit(2), memory=3, held=[2.0, 1.0])
    assert [row.index(1) for row in next(list_starts(held, v_shaped=False)).tolist()] == [1, 1]


def test_two_stages_begin_with_one_microbatch_after_another() -> None:
    one = make_instance(deal_in_turn(2, 2), 2, Times.unit(4))
    assert next(list_starts(one, v_shaped=False)).tolist() == [[0, 2, 3, 1] * 2] * 2
    folded = make_instance(go_there_and_back(2), 4, Times.unit(4))
    first, *rest = list_starts(folded, v_shaped=True)
    one_by_one = np.tile([0, 2, 3, 1], (2, 4))
    assert any((order == one_by_one).all() for order in rest) and (first != one_by_one).any()
    # With the memory of 1F1B's first device there is one order by rule, with more of it several.
    exact = make_instance(go_there_and_back(2), 4, Times.unit(4), memory=2)
    assert ([*list_starts(exact, v_shaped=True)][1] == one_by_one).all()
    assert not (rest[0] == one_by_one).all()
    # F of both chunks before the first I: 2 p forwards of the first on device 0 in a row.
    assert first[0].tolist()[:3] == [0, 0, 0]


def test_little_memory_has_its_own_orders() -> None:
    one = make_instance(go_there_and_back(4), 8, Times.unit(8), memory=2)
    runs = [evaluate(one, order, np.zeros(order.shape))[0] for order in list_low_memory_starts(one)]
    usual = [evaluate(one, order, np.zeros(order.shape))[0] for order in list_starts(one, v_shaped=True)]
    assert all(step < NEVER for step in runs)
    assert min(runs) < min(usual)


def test_orders_that_repeat_follow_their_lags() -> None:
    """F and I of 1 ms and W of 0: a lag of a sixth of the work is 2/3 ms, and a period 4 ms at least."""
    times = Times([1.0] * 4, [1.0] * 4, weight_ms=[0.0] * 4)
    one = make_instance(go_there_and_back(2), 3, times)
    found = [order.tolist() for order in list_repeating_starts(one, find_heads(one).head)]
    assert len(found) == 3**4 * 11
    # Without lags, device 0 does F0, F1, I1 and I0 of a microbatch at 0, 3, 4 and 7 ms, and device 1 at 1, 2, 5 and 6.
    assert found[0] == [[0, 2, 0, 3, 1, 2, 0, 3, 1, 2, 3, 1], [0, 2, 0, 3, 1, 2, 0, 3, 1, 2, 3, 1]]
    # A period later means 6 ms at most: the next F0 comes before I0 of the same microbatch, but after its I1.
    assert found[10] == [[0, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 1], [0, 2, 3, 1] * 3]
    # A lag of 2/3 ms on the last way: I0 of device 0 is at 7.67 ms, after F1 of the next microbatch at 7 ms.
    assert found[11] == [[0, 2, 0, 3, 2, 1, 0, 3, 2, 1, 3, 1], found[0][1]]


def test_orders_that_repeat_are_better_with_little_memory() -> None:
    times = Times([9.0] * 16, [13.5] * 16, [0.3] * 16, [0.3] * 16, weight_ms=[4.5] * 16)
    one = make_instance(go_there_and_back(8), 24, times, memory=4)
    rules = np.zeros((8, 4 * 24))
    runs = [evaluate(one, order, rules)[0] for order in list_repeating_starts(one, find_heads(one).head)]
    others = [evaluate(one, order, rules)[0] for order in [*list_starts(one, True), *list_low_memory_starts(one)]]
    # Most do not fit the memory.
    assert 0 < sum(step < NEVER for step in runs) < len(runs)
    assert min(runs) < min(others)
