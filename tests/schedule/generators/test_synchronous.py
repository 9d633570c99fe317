"""Parts of the generators: order of replicas, limits, and numbers that schedules are not made for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxsplit.errors import ScheduleError
from fxsplit.schedule import Action, Times, generate, simulate, verify
from fxsplit.schedule.generators.greedy import Rows
from fxsplit.schedule.generators.synchronous import (
    alternate,
    count_in_flight,
    inference,
    run_forwards,
    run_forwards_first,
    schedule_replicas,
)
from fxsplit.schedule.homes import cross_both_ways, deal_in_turn, go_there_and_back, group_in_blocks, line
from fxsplit.schedule.simulation.memory import Footprint, find_peak, trace_memory


def text(rows: Rows) -> str:
    return "\n".join(" ".join(str(action) for action in row) for row in rows)


def test_homes() -> None:
    assert line(3) == ((0,), (1,), (2,))
    assert deal_in_turn(2, 2) == ((0,), (1,), (0,), (1,))
    assert go_there_and_back(2) == ((0,), (1,), (1,), (0,))
    assert cross_both_ways(3) == ((0, 2), (1, 1), (2, 0))
    assert group_in_blocks([2, 0, 1]) == ((0,), (0,), (2,))


def test_alternate() -> None:
    forwards, backwards = ([Action(0, op, m) for m in range(3)] for op in "FB")
    rows = {warm_up: text((alternate(forwards, backwards, warm_up),)) for warm_up in (0, 1, 9)}
    assert rows == {0: "0F0 0B0 0F1 0B1 0F2 0B2", 1: "0F0 0F1 0B0 0F2 0B1 0B2", 9: "0F0 0F1 0F2 0B0 0B1 0B2"}


def test_replicas_take_microbatches_in_turn() -> None:
    rows = run_forwards_first(((0,), (1, 2)), 3)
    assert text(rows) == "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F2 1B0 1B2\n1F1r1 1B1r1"


def test_how_many_keep_all_devices_busy() -> None:
    assert count_in_flight(line(3)) == [3, 2, 1]
    assert count_in_flight(((0,), (1, 2))) == [3, 1] and count_in_flight(((0, 1), (2, 3, 4))) == [3, 1]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("GPipe", "0F0 0F1 0B0 0B1\n1F0 1B0 1REDUCE\n1F1r1 1B1r1 1REDUCEr1"),
        ("1F1B", "0F0 0F1 0B0 0B1\n1F0 1B0 1REDUCE\n1F1r1 1B1r1 1REDUCEr1"),
        ("ZB-H1", "0F0 0F1 0I0 0I1 0W0 0W1\n1F0 1I0 1W0 1REDUCE\n1F1r1 1I1r1 1W1r1 1REDUCEr1"),
    ],
)
def test_replicas_sum_at_the_end(name: str, rows: str) -> None:
    schedule = schedule_replicas(name, ((0,), (1, 2)), 2, [3, 1])
    verify(schedule)
    assert str(schedule) == rows and schedule.name == name


def test_a_replica_holds_no_more_than_it_may() -> None:
    homes = ((0,), (1, 2))
    assert schedule_replicas("1F1B", homes, 8, [3, 1]).peak_in_flight() == (3, 1)
    assert schedule_replicas("1F1B", homes, 8, [2, 1]).peak_in_flight() == (2, 1)
    assert schedule_replicas("GPipe", homes, 8, [2, 1]).peak_in_flight() == (8, 4), "which holds all of them"


def test_interleaved_with_other_numbers_of_stages() -> None:
    assert generate("Interleaved1F1B", 3, 4, 1).actions == generate("1F1B", 3, 4).actions
    assert generate("Interleaved1F1B", 2, 3).peak_activations() == (3.0, 2.0), "one round of three microbatches"
    deep = generate("Interleaved1F1B", 2, 2, 3)
    assert str(deep).splitlines()[1] == "1F0 1F1 3F0 3F1 5F0 5B0 5F1 5B1 3B0 3B1 1B0 1B1"
    with pytest.raises(ScheduleError, match=r"9 microbatches do not divide .* give 8 or 12"):
        generate("Interleaved1F1B", 4, 9)
    assert generate("Interleaved1F1B", 4, 3).n_microbatches == 3, "fewer than one round"


def test_chimera_names_the_even_numbers_next_to_an_odd_one() -> None:
    with pytest.raises(ScheduleError, match=r"1 devices do not divide into two directions: give 2$"):
        generate("Chimera", 1, 2)
    with pytest.raises(ScheduleError, match="3 microbatches do not divide into two directions: give 2 or 4"):
        generate("Chimera", 2, 3)


@pytest.mark.parametrize(
    ("name", "per_device", "count"),
    [("GPipe", 2, 1), ("1F1B", 2, 1), ("ZB-H1", 2, 1), ("Chimera", 2, 1), ("ZBVZeroBubble", 1, 2)],
)
def test_numbers_of_stages_that_a_schedule_is_not_made_for(name: str, per_device: int, count: int) -> None:
    with pytest.raises(ScheduleError, match=f"{name}: {per_device} stages a device; it is made for {count}"):
        generate(name, 2, 4, per_device)
    assert generate(name, 2, 4, count).n_stages == 2 * count


def test_chimera_on_four_devices() -> None:
    """With at most one microbatch a device backwards go first; with more, the action nearest to its end."""
    assert str(generate("Chimera", 4, 4)) == (
        "0F0 0F2 3F1r1 3B1r1 3F3r1 3B3r1 0B0 0B2 0REDUCE 3REDUCEr1\n"
        "1F0 2F1r1 1F2 2F3r1 2B1r1 1B0 2B3r1 1B2 1REDUCE 2REDUCEr1\n"
        "1F1r1 2F0 1F3r1 2F2 2B0 1B1r1 2B2 1B3r1 1REDUCEr1 2REDUCE\n"
        "0F1r1 0F3r1 3F0 3B0 3F2 3B2 0B1r1 0B3r1 0REDUCEr1 3REDUCE"
    )


def test_inference_has_forwards_alone() -> None:
    schedule = inference(2, 3)
    verify(schedule)
    assert str(schedule) == "0F0 0F1 0F2\n1F0 1F1 1F2" and not schedule.trains
    simulation = simulate(schedule, Times([1.0, 2.0], [9.0, 9.0]))
    assert simulation.step_ms == 7.0
    # A stage keeps nothing of a microbatch that it has handed on.
    traces = trace_memory(simulation, [Footprint(100.0, forward_bytes=7.0, resting_bytes=5.0)] * 2)
    assert [find_peak(trace) for trace in traces] == [107.0, 107.0]
    with pytest.raises(ScheduleError, match="2 stages a device"):
        inference(2, 3, 2)
    with pytest.raises(ScheduleError, match="0B0 is never done"):
        verify(replace(schedule, trains=True))
    assert str(run_forwards(((0,), (1, 2)), 3)) == "0F0 0F1 0F2\n1F0 1F2\n1F1r1"
