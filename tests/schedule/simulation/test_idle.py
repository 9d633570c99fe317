"""Idle time by cause: it adds up to the bubble, and the critical path to the step."""

from __future__ import annotations

import itertools

import pytest

from fxsplit.schedule import SCHEDULES, Times, generate, simulate
from fxsplit.schedule.simulation.idle import explain_idle, find_critical_path, sum_causes

TIMES = Times([1.0, 2.0, 1.5, 1.0], [2.0, 3.0, 3.5, 2.0], [0.5] * 4, [0.5] * 4, latency_ms=[0.25] * 4)


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n not in ("Chimera", "PipeDream", "PipeDream-2BW")])
@pytest.mark.parametrize("transfers", ["asynchronous", "blocking"])
def test_causes_add_up_to_the_bubble(name: str, transfers: str) -> None:
    schedule = generate(name, 2 if len(generate(name, 2, 8).homes) == 4 else 4, 8)
    times = Times(TIMES.forward_ms, TIMES.backward_ms, [0.5] * 4, [0.5] * 4, latency_ms=[0.25] * 4,
                  transfers="blocking" if transfers == "blocking" else "asynchronous")  # fmt: skip
    simulation = simulate(schedule, times)
    idle = explain_idle(simulation)
    for row, share in zip(idle, simulation.bubbles, strict=True):
        assert sum(sum_causes(row).values()) == pytest.approx(share * simulation.step_ms, abs=1e-6)
        assert all(a.end_ms <= b.begin_ms + 1e-9 for a, b in itertools.pairwise(row))
    path = find_critical_path(simulation)
    spans = [simulation.spans[device][number] for device, number in path]
    assert spans[0][0] == 0.0 and spans[-1][1] == simulation.step_ms
    assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans))


def test_each_cause_by_hand() -> None:
    """Two stages, one microbatch: the first waits for the second, and then for the message back."""
    simulation = simulate(generate("GPipe", 2, 1), Times([1, 1], [2, 2], [0.0, 0.5], [0.0, 0.5]))
    first, second = map(sum_causes, explain_idle(simulation))
    assert first == {"stage": pytest.approx(3.5), "transfer": pytest.approx(0.5)}
    assert second == {"fill": pytest.approx(1.5), "drain": pytest.approx(2.5)}
    assert find_critical_path(simulation) == [(0, 0), (1, 0), (1, 1), (0, 1)]


def test_a_host_that_launches_late_is_a_cause() -> None:
    times = Times([1.0], [1.0], forward_launch_ms=[3.0], backward_launch_ms=[0.0])
    (row,) = explain_idle(simulate(generate("GPipe", 1, 2), times))
    assert set(sum_causes(row)) <= {"launch", "fill"}


def test_no_actions_are_no_path() -> None:
    simulation = simulate(generate("GPipe", 1, 1).only("W"), Times.unit(1))
    assert find_critical_path(simulation) == [] and explain_idle(simulation) == [[]]
