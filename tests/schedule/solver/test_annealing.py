"""Annealing: it never returns a slower candidate, and the same seed returns the same one."""

from __future__ import annotations

import time
from itertools import islice
from math import inf
from random import Random

import numpy as np
import pytest

from fxsplit.schedule import Times
from fxsplit.schedule.generators.fill import evaluate, list_rules
from fxsplit.schedule.homes import deal_in_turn, go_there_and_back, line
from fxsplit.schedule.kernels import compile_kernels
from fxsplit.schedule.kernels.instance import Instance, make_instance
from fxsplit.schedule.kernels.orders import NEVER
from fxsplit.schedule.solver.annealing import (
    DEEP,
    ENDING,
    FINE,
    HOT,
    LENGTH,
    MEDIUM,
    ROUGH,
    SMALL,
    Candidate,
    Setting,
    find_best,
    improve,
    list_settings,
)
from fxsplit.schedule.solver.starts import list_starts
from tests.support.exact_schedules import draw, make_arrays

SETTINGS = [ROUGH, *FINE, ENDING, *HOT]


def begin(one: Instance, v_shaped: bool) -> Candidate:
    start = find_best(one, islice(list_starts(one, v_shaped), 1), [*list_rules(one, [(0.0, 0.0)])], 0.0, inf)
    assert start is not None
    return start


@pytest.mark.parametrize("setting", SETTINGS)
def test_candidates_take_the_step_that_they_state(setting: Setting) -> None:
    compile_kernels()
    shorter = 0
    for seed in range(6):
        placement = ("line", "v")[seed % 2]
        one = make_arrays(draw(Random(f"annealing {placement}{seed}"), placement))
        one = one._replace(memory=np.full(one.n_devices, 1e9))
        start = begin(one, placement == "v")
        found = improve(one, start, 0.0, setting._replace(length=300_000), seed, inf)
        assert found.step <= start.step
        assert evaluate(one, found.orders, found.rules)[0] == pytest.approx(found.step, rel=1e-12)
        again = improve(one, start, 0.0, setting._replace(length=300_000), seed, inf)
        assert again.step == found.step and (again.orders == found.orders).all() and (again.rules == found.rules).all()
        shorter += found.step < start.step
        # A goal that is met ends at once.
        assert improve(one, start, start.step, setting, seed, inf).step == start.step
    # The end of small instances is all that ENDING changes.
    assert shorter > 1 or setting is ENDING


def make_long() -> tuple[Instance, Candidate]:
    """Return an instance, and the order of one microbatch after another."""
    times = Times([2.0, 3.0, 2.0, 2.5, 3.5, 2.0], [5.0, 7.0, 4.0, 6.0, 6.0, 5.0])
    one = make_instance(deal_in_turn(3, 2), 24, times)
    return one, begin(one, v_shaped=False)


def test_another_seed_goes_another_way() -> None:
    compile_kernels()
    one, start = make_long()
    found = [improve(one, start, 0.0, ROUGH._replace(length=200_000), seed, inf) for seed in range(4)]
    assert len({c.orders.tobytes() for c in found}) == 4


def test_the_ending_leaves_the_beginning_as_it_is() -> None:
    compile_kernels()
    random = Random(0)
    forward, backward = [random.uniform(2, 4) for _ in range(8)], [random.uniform(4, 7) for _ in range(8)]
    one = make_instance(go_there_and_back(4), 16, Times(forward, backward, [0.5] * 8, [0.5] * 8), memory=4.0)
    kept: dict[bool, int] = {}
    for order in islice(list_starts(one, v_shaped=True), 2, 8):
        start = find_best(one, iter([order]), [*list_rules(one, [(0.5, 0.5)])], 0.0, inf)
        assert start is not None
        for setting in (ENDING, ROUGH):
            found = improve(one, start, 0.0, setting._replace(length=1_000_000), 0, inf)
            assert found.step < start.step
            rows = (found.orders != start.orders) | (found.rules != start.rules)
            same = min(int(np.argmax(row)) if row.any() else row.size for row in rows)
            kept[setting is ENDING] = min(same, kept.get(setting is ENDING, same))
    # Each row has 64 entries, and the time of about three microbatches is changed.
    assert kept[True] > 32 and kept[False] < 10


def test_settings_depend_on_the_size() -> None:
    def first(one: Instance, count: int = 8) -> list[Setting]:
        return [*islice(list_settings(one), count)]

    small = make_instance(line(2), 5, Times.unit(2))
    assert small.n_actions <= SMALL
    assert first(small, 3) == HOT
    # Each round takes twice as long.
    assert [s.length for s in first(small, 6)[3:]] == [2 * s.length for s in HOT]
    medium = make_instance(line(4), 16, Times.unit(4))
    assert SMALL < medium.n_actions <= MEDIUM
    assert first(medium, 2) == [HOT[0], ROUGH]
    large = make_instance(line(4), 40, Times.unit(4))
    assert first(large, 2) == [ROUGH, FINE[0]]
    folded = make_instance(go_there_and_back(4), 40, Times.unit(8))
    ending = first(folded, 1)[0]
    # With more memory than 1F1B's first device has, the whole order may change.
    assert ending == ROUGH
    # The part of the order that ENDING changes is that of some microbatches on each device.
    ending = ENDING._replace(length=LENGTH * 8 * 4)
    assert ending in first(folded)
    tight = make_instance(go_there_and_back(4), 40, Times.unit(8), memory=2)
    assert first(tight, 4) == [ROUGH, FINE[0], ending, DEEP._replace(length=4 * LENGTH * 8 * 4)]
    exact = make_instance(go_there_and_back(4), 40, Times.unit(8), memory=4)
    # Each begins cooler than the one before.
    cooler = [(0.3, ending.length), (0.15, 2 * ending.length), (0.1, 2 * ending.length)]
    assert first(exact, 4) == [*(ENDING._replace(warmth=warmth, length=length) for warmth, length in cooler), ROUGH]


def test_the_best_of_orders_and_rules_is_found() -> None:
    one = make_instance(line(3), 6, Times.unit(3))
    orders = [*list_starts(one, v_shaped=False)]
    rules = [*list_rules(one, [(1.0, 1.0), (0.0, 0.0)])]
    steps = [evaluate(one, order, rule)[0] for order in orders for rule in rules]
    best = find_best(one, iter(orders), rules, 0.0, inf)
    assert best is not None and best.step == min(steps)
    assert evaluate(one, best.orders, best.rules)[0] == best.step
    # At the goal, or after the deadline, no more orders are tried.
    for goal, deadline in ((NEVER, inf), (0.0, time.monotonic() - 1)):
        tried = iter(orders)
        early = find_best(one, tried, rules, goal, deadline)
        assert early is not None and early.step == min(steps[:2])
        assert len([*tried]) == len(orders) - 1
    blocked = np.array([[0, 1] * 6, [0] * 6 + [1] * 6, [1] * 6 + [0] * 6])
    assert find_best(one, iter([blocked]), rules, 0.0, inf) is None
