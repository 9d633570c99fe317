"""The kernel of complete rows beside the simulator: the very same step, to the last digit."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from fxsplit.errors import ScheduleError
from fxsplit.schedule import Action, Schedule, Times, generate, simulate
from fxsplit.schedule.generators.fill import find_step
from fxsplit.schedule.homes import line
from fxsplit.schedule.kernels import compile_kernels, rows
from fxsplit.schedule.kernels.instance import make_instance

SPLIT = [("ZB-H1", 1), ("ZB-H2", 1), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2), ("V-Half", 2)]


def draw_times(random: Random, count: int) -> Times:
    forward, backward = ([random.uniform(1, 5) for _ in range(count)] for _ in range(2))
    there, back = ([random.uniform(0, 2) for _ in range(count)] for _ in range(2))
    weight = [backward[s] * random.random() for s in range(count)]
    latency = [random.uniform(0, 3) for _ in range(count)] if random.random() < 0.5 else []
    return Times(forward, backward, there, back, weight_ms=weight, latency_ms=latency)


@pytest.fixture(params=["plain", "compiled"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the kernel in plain Python, and again with the compiled one."""
    if request.param == "compiled":
        compile_kernels()
    else:
        monkeypatch.setattr(rows, "run_rows", rows.KERNELS[0])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("name", "each"), SPLIT)
def test_rows_take_as_long_as_in_the_simulation(name: str, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(6):
        random = Random(f"{name}{seed}")
        p = random.randint(1, 4)
        times = draw_times(random, p * each)
        schedule = generate(name, p, p * random.randint(1, 3), each, times)
        expected = simulate(schedule, times).step_ms
        with monkeypatch.context() as patch:
            # The simulator is not asked.
            patch.setattr("fxsplit.schedule.generators.fill.simulate", None)
            assert find_step(schedule, times) == expected


@pytest.mark.usefixtures("kernels")
def test_rows_that_wait_for_each_other_are_stuck() -> None:
    one = make_instance(line(2), 1, Times.unit(2))
    # The I of stage 0 before its F; and a W before its I.
    for first in ([(0, 1, 0), (0, 0, 0), (0, 2, 0)], [(0, 0, 0), (0, 2, 0), (0, 1, 0)]):
        assert rows.run_rows(one, np.array([first, [(1, 0, 0), (1, 1, 0), (1, 2, 0)]])) == rows.STUCK
    blocked = Schedule("x", 1, line(1), ((Action(0, "F", 0), Action(0, "W", 0), Action(0, "I", 0)),))
    with pytest.raises(ScheduleError):
        find_step(blocked, Times.unit(1))


def test_other_schedules_are_simulated() -> None:
    """Whole backwards, pairs, rows of different lengths, launches, and blocking transfers."""
    times = draw_times(Random(3), 8)
    for name, each in (("1F1B", 1), ("DualPipeV", 2), ("Chimera", 1)):
        schedule = generate(name, 4, 8, each)
        used = draw_times(Random(4), schedule.n_stages)
        assert find_step(schedule, used) == simulate(schedule, used).step_ms
    schedule = generate("ZBVZeroBubble", 4, 8, 2, times)
    plain = find_step(schedule, times)
    for more in ({"forward_launch_ms": [20.0] * 8}, {"backward_launch_ms": [20.0] * 8}, {"transfers": "blocking"}):
        slow = Times(**{**vars(times), **more})
        assert find_step(schedule, slow) == simulate(schedule, slow).step_ms > plain
    uneven = Schedule("x", 1, line(2), ((Action(0, "F", 0),), (Action(1, "F", 0), Action(1, "I", 0))))
    assert find_step(uneven, Times.unit(2)) == 3.0
    with pytest.raises(ScheduleError, match="8 stages, and forward_ms has 3"):
        find_step(schedule, Times.unit(3))
