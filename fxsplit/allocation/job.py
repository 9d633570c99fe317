"""Job: a training job that runs on any number of equal devices, with its rate on each number."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxsplit.errors import InputError
from fxsplit.system.figures import AMOUNT, is_amount, is_count, show

Values = NDArray[np.float64]
"""A number for each count of devices from 0 on; -inf for a count that a job may not have."""


@dataclass(frozen=True)
class Job:
    """A job that gets no device, or `least` to `most` devices.

    - `curve` has the rates on 1, 2, ... devices, in samples a second. They need not rise. On more devices than the
      curve has numbers, the job works as fast as on its last number, and on no device it does not work
    - `profile` is the path of a profile, from which `fxsplit.allocate` plans the curve. A job has one of the two
    - `most` is the length of the curve by default
    - a sample of the job counts `weight` times
    - a change to more devices costs `up_s` seconds of work at the present rate, a change to fewer `down_s`
    - `n_microbatches` cuts each batch of a planned job, on any number of devices (default: two for each of `most`)

    Raises InputError, with the job's name, for an invalid value.
    """

    name: str
    curve: Sequence[float] = ()
    least: int = 1
    most: int | None = None
    weight: float = 1.0
    up_s: float = 0.0
    down_s: float = 0.0
    profile: str | os.PathLike[str] | None = None
    n_microbatches: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"a job has name={show(self.name)}: give a text")
        _check_curve(self)
        for field in ("weight", "up_s", "down_s"):
            value = getattr(self, field)
            if not is_amount(value):
                raise InputError(f"{self} has {field}={show(value)}: give {AMOUNT}")
        for field in ("least", "most", "n_microbatches"):
            value = getattr(self, field)
            if value is not None and not is_count(value, 1):
                raise InputError(f"{self} has {field}={show(value)}: give a whole number, at least 1")
        if self.most is not None and self.most < self.least:
            raise InputError(f"{self} has least={self.least} and most={self.most}: give a larger most")
        if self.curve and len(self.curve) < (self.most or self.least):
            key, count = ("most", self.most) if self.most else ("least", self.least)
            raise InputError(
                f"{self} has {key}={count} and a curve of {len(self.curve)}: give the rate on each number of devices"
            )

    def __str__(self) -> str:
        return f"job {show(self.name)}"

    @cached_property
    def rates(self) -> Values:
        """The rate on each number of devices, from 0 to the length of the curve, in samples a second."""
        return np.array([0.0, *self.curve])

    @cached_property
    def allowed(self) -> Values:
        """0 for each count from 0 to `most` that the job may have, and -inf for the others."""
        counts = np.arange((self.most or len(self.curve)) + 1)
        return np.where((counts == 0) | (counts >= self.least), 0.0, -inf)

    def rate(self, count: int) -> float:
        """Return the rate on a number of devices, in samples a second."""
        return float(self.rates[min(count, len(self.rates) - 1)])

    def move_s(self, current: int, count: int) -> float:
        """Return the seconds of work that a change from `current` to `count` devices costs."""
        return self.up_s if count > current else self.down_s if count < current else 0.0

    def gains(self, current: int, horizon_s: float) -> Values:
        """Return what each count of devices brings until the horizon, in weighted samples.

        That is weight x (horizon x rate(count) - rate(current) x seconds of the move), as in BFTrainer (Liu et al.
        2021). A count that the job may not have has -inf.
        """
        gains = (self.weight * horizon_s) * self.rates[: len(self.allowed)] + self.allowed
        rate = self.weight * self.rate(current)
        gains[:current] -= rate * self.down_s
        gains[current + 1 :] -= rate * self.up_s
        return gains


def _check_curve(job: Job) -> None:
    """Raise InputError unless a job has a curve of amounts, or a profile in its place."""
    curve: Any = job.curve
    if isinstance(curve, (str, bytes)) or not isinstance(curve, (Sequence, np.ndarray)):
        raise InputError(f"{job} has curve={show(curve)}: give a list of rates, on 1, 2, ... devices")
    for count, rate in enumerate(curve, 1):
        if not is_amount(rate):
            raise InputError(f"{job} has the rate {show(rate)} on {count} devices: give {AMOUNT}")
    if bool(len(curve)) == (job.profile is not None):
        raise InputError(f"{job} has {'both' if len(curve) else 'neither'} of curve and profile: give one")
    # The fields are set once, here: a list could change later.
    object.__setattr__(job, "curve", tuple(float(rate) for rate in curve))
