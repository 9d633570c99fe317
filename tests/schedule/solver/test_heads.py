"""Heads and tails: figures worked out by hand, and bounds that no schedule is below."""

from __future__ import annotations

from random import Random

import pytest

from fxsplit.schedule import Times, generate, simulate
from fxsplit.schedule.homes import go_there_and_back, line
from fxsplit.schedule.kernels.instance import make_instance
from fxsplit.schedule.solver.heads import bound_by_memory, bound_by_ways, bound_by_work, find_heads
from fxsplit.schedule.solver.search import search
from tests.support.exact_schedules import draw, find_optimum, make_arrays

TIMES = Times([2.0, 3.0], [5.0, 4.0], [0.0, 1.0], [0.0, 2.0], weight_ms=[1.0, 1.5], latency_ms=[0.0, 0.5])
"""F 2 and 3, I 4 and 2.5, W 1 and 1.5 ms; a value takes 1.5 ms between the devices, and a gradient 2.5 ms."""


def test_heads_and_tails_follow_the_ways_of_microbatches() -> None:
    found = find_heads(make_instance(line(2), 2, TIMES))
    #    0F0 to 2, 1F0 from 3.5 to 6.5, 1I0 to 9, 0I0 from 11.5
    assert found.head[0].tolist() == [[0, 2], [3.5, 6.5]]
    assert found.head[1].tolist() == [[11.5, 15.5], [6.5, 9.5]]
    assert found.weight_head.tolist() == [[15.5, 19.5], [9.0, 12.0]]
    # Behind 0I1 comes its W; behind 0I0 also 0I1. A W of stage 1 may be last.
    assert found.weight_tail.tolist() == [[1, 0], [1.5, 0]]
    assert found.tail[1].tolist() == [[5, 1], [11.5, 7.5]]
    # 1F1 is followed by 1I1 (2.5 ms), and 1F0 by 1F1 (3 ms) and more.
    assert found.tail[0].tolist() == [[18.5, 14.5], [14, 10]]


def test_links_carry_one_message_at_a_time() -> None:
    """A hop longer than the work sets the pace, both of heads and of tails."""
    slow = make_instance(line(2), 3, Times([1.0] * 2, [2.0] * 2, [0.0, 5.0], [0.0, 7.0], latency_ms=[0.0, 1.0]))
    found = find_heads(slow)
    assert found.head[0, 1].tolist() == [7, 12, 17]
    assert found.head[1, 0].tolist() == [9 + 8, 9 + 15, 9 + 22]
    assert found.tail[1, 1].tolist() == [24, 17, 10]
    assert found.tail[0, 0].tolist()[-1] == 5 + 1 + 1 + 1 + 10
    assert bound_by_ways(slow, found) == 33


def test_the_longest_way_counts_weights() -> None:
    times = Times([1.0] * 2, [11.0] * 2, weight_ms=[10.0] * 2)
    one = make_instance(line(2), 1, times)
    # 0F 1F 1I 0I and then 0W.
    assert bound_by_ways(one, find_heads(one)) == 14
    many = make_instance(line(2), 5, times)
    assert bound_by_ways(many, find_heads(many)) == 4 + 50
    assert bound_by_work(many, find_heads(many)) == 1 + 60


def test_work_without_gaps_is_a_bound() -> None:
    one = make_instance(line(3), 8, Times.unit(3))
    heads = find_heads(one)
    # The last device waits for 2 ms, works for 24, and its last I (or W, then one more) goes back for 2.
    assert bound_by_work(one, heads) == 26
    best = search(Times.unit(3), n_devices=3, n_microbatches=8)
    assert best.bound_ms == best.step_ms == 26


def test_memory_delays_the_first_gradient() -> None:
    times = Times.unit(3)
    # The first device holds one microbatch: it waits for its I from 1 to 5 ms, and again each time.
    tight = make_instance(line(3), 8, times, memory=1)
    assert bound_by_memory(tight, find_heads(tight)) > bound_by_work(tight, find_heads(tight)) - 5
    values = [bound_by_memory(make_instance(line(3), 8, times, m), find_heads(tight)) for m in (1, 2, 3, 4, 5, 8)]
    # With m microbatches the first I waits for 5 - m ms, and after the last F as much, with one W that can fill it.
    assert values == sorted(values, reverse=True)
    assert values[-1] == 0.0
    # The first I waits from 1 to 5 ms, and after the last F the device waits for its I as long.
    first = make_instance(line(3), 8, times, memory=[1, 8, 8])
    assert bound_by_memory(first, find_heads(first)) == 4 + 24 + 4


@pytest.mark.parametrize("placement", ["line", "v", "loop"])
def test_no_bound_is_above_the_optimum(placement: str) -> None:
    close = 0
    for seed in range(12):
        x = draw(Random(f"heads {placement}{seed}"), placement, 2)
        one = make_arrays(x)
        heads = find_heads(one)
        low = max(bound_by_ways(one, heads), bound_by_work(one, heads), bound_by_memory(one, heads))
        # The referee looks below 1.5 times the bound: then there is a schedule or its step is larger.
        optimum = find_optimum(x, 1.3 * low)
        assert low <= optimum * (1 + 1e-9)
        close += low >= 0.99 * optimum
    assert close > 1


@pytest.mark.parametrize("memory", [1, 2, 4, None])
def test_named_schedules_keep_to_heads_and_tails(memory: float | None) -> None:
    """Every F and I begins at its head or later, and its tail fits before the end."""
    times = Times([2.0, 3.0, 1.0, 2.5], [5.0, 4.0, 6.0, 3.0], [1.0] * 4, [0.5] * 4, latency_ms=[0.25] * 4)
    for name, homes in (("ZBVZeroBubble", go_there_and_back(2)), ("ZB-H1", line(4)), ("ZB-H2", line(4))):
        schedule = generate(name, 1 + max(h[0] for h in homes), 6, None, times)
        found = simulate(schedule, times)
        heads = find_heads(make_instance(homes, 6, times, memory))
        for row, spans in zip(schedule.actions, found.spans, strict=True):
            for action, (begin, end) in zip(row, spans, strict=True):
                s, m = action.stage, action.microbatch
                head, tail = (
                    (heads.weight_head[s, m], heads.weight_tail[s, m])
                    if action.op == "W"
                    else (heads.head["FI".index(action.op), s, m], heads.tail["FI".index(action.op), s, m])
                )
                assert begin >= head - 1e-9 and end + tail <= found.step_ms + 1e-9
