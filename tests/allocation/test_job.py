"""A job: its gains are the definition's, and what is wrong with it is named."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest

from fxsplit.allocation.job import Job
from fxsplit.errors import InputError
from tests.support.refusals import refused


@pytest.mark.parametrize("current", [0, 1, 3, 9])
def test_gains_are_those_of_the_definition(current: int) -> None:
    """`current` may be 0, below `least`, between it and `most`, or above."""
    job = Job("a", [2.0, 3.0, 5.0, 4.0, 9.0], least=2, most=4, weight=3.0, up_s=7.0, down_s=5.0)
    curve = [0.0, 2.0, 3.0, 5.0, 4.0, 9.0]
    now = curve[min(current, 5)]
    for count, gain in enumerate(job.gains(current, 60.0)):
        seconds = 7.0 if count > current else 5.0 if count < current else 0.0
        allowed = count == 0 or count >= 2
        assert gain == (pytest.approx(3.0 * (60.0 * curve[count] - now * seconds)) if allowed else -inf)
        assert job.move_s(current, count) == seconds
    assert len(job.gains(current, 60.0)) == 5


def test_a_curve_may_be_an_array_and_cannot_change() -> None:
    curve = np.array([1.0, 2.0])
    job = Job("a", curve)  # type: ignore[arg-type]
    curve[0] = 9.0
    assert job.curve == (1.0, 2.0) and job.rate(1) == 1.0 and job.rate(5) == 2.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "", "curve": [1]}, "a job has name='': give a text"),
        ({"curve": [1], "most": 2}, "job 'a' has most=2 and a curve of 1: give the rate on each number"),
        ({"curve": [1], "least": 2}, "job 'a' has least=2 and a curve of 1"),
        ({"curve": [1, 2, 3], "least": 3, "most": 2}, "has least=3 and most=2: give a larger most"),
        ({"curve": [1, -1]}, "has the rate -1 on 2 devices: give a finite number, zero or more"),
        ({"curve": [float("nan")]}, "has the rate nan on 1 devices"),
        ({"curve": ["1"]}, "has the rate '1' on 1 devices"),
        ({"curve": "12"}, "has curve='12': give a list of rates"),
        ({"curve": 3}, "has curve=3: give a list of rates"),
        ({}, "has neither of curve and profile: give one"),
        ({"curve": [1], "profile": "b.json"}, "has both of curve and profile: give one"),
        ({"curve": [1], "weight": -1}, "has weight=-1: give a finite number, zero or more"),
        ({"curve": [1], "up_s": "18"}, "has up_s='18': give a finite number"),
        ({"curve": [1], "down_s": inf}, "has down_s=inf: give a finite number"),
        ({"curve": [1], "least": 0}, "has least=0: give a whole number, at least 1"),
        ({"curve": [1], "most": True}, "has most=True: give a whole number"),
        ({"profile": "b.json", "most": 2, "n_microbatches": 0}, "has n_microbatches=0: give a whole number"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], message: str) -> None:
    with refused(InputError, message):
        Job(**{"name": "a", **given})
