"""Random delays around everything that streams hand over: an event that is missing becomes a wrong number."""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F

from bench.gpu.checks.equality import CLOSE
from bench.gpu.setting import FAST, MICROBATCHES, RECOMPUTING, Net, Setting
from fxsplit.api.compare import compare, run_pipeline_step, run_unsplit_step
from fxsplit.runtime.streams import AcceleratorStream, Stream

MODES: tuple[dict[str, Any], ...] = ({}, {"passes": RECOMPUTING}, {"deferred_batch_norm": True})
STEPS = 3
LONGEST_CYCLES = 2e6
"""The longest delay: about a millisecond."""


def run_chaos(setting: Setting, seconds: float = 65.0) -> int:
    """Take steps with delays under all schedules, for so many seconds; return how many checks do not hold."""
    # The same delays each time, but threads reach them in another order: a failure may need several runs to come back.
    rng = random.Random(0)
    # The CPU's streams in a dry run, whose delays do nothing, so that the same lines run.
    kind: type[Any] = Stream if setting.dry else AcceleratorStream
    mark, receive = kind.mark, kind.receive

    def delay() -> None:
        if rng.random() < 0.3:
            setting.occupy(rng.uniform(1e5, LONGEST_CYCLES))

    def mark_late(self: Any) -> Any:
        delay()
        return mark(self)

    def receive_late(self: Any, values: Sequence[Any], token: Any = None) -> list[Any]:
        delay()
        received: list[Any] = receive(self, values, token)
        delay()
        return received

    with patch.object(kind, "mark", mark_late), patch.object(kind, "receive", receive_late):
        steps, worst = _step_for(setting, seconds, lambda: setting.occupy(rng.uniform(0, LONGEST_CYCLES / 2)))
    print(f"{'ok' if worst < CLOSE else 'FAIL'} chaos: {steps} steps with delays, largest difference {worst:.1e}")
    return int(worst >= CLOSE)


def _step_for(setting: Setting, seconds: float, delay: Callable[[], None]) -> tuple[int, float]:
    """Return how many steps were taken until the time was over, and their largest difference from the unsplit model."""
    x, y = setting.make_batch()
    end = time.monotonic() + seconds
    steps, worst = 0, 0.0
    turns = itertools.cycle(itertools.product(setting.schedules, MODES, (2, 4)))
    while steps == 0 or time.monotonic() < end:
        schedule, mode, n_devices = next(turns)
        model = Net().double().to(setting.device)
        # The twin takes the same steps unsplit, so that statistics of batch norm go on from the same values.
        twin = copy.deepcopy(model)
        options = {"passes": FAST, **mode}
        with setting.compile(model, n_devices, schedule=schedule, example_inputs=x, **options) as pipe:
            for _ in range(STEPS):
                delay()
                # Other inputs in each step: a value of the step before would go unnoticed among equal ones.
                inputs = torch.randn_like(x)
                expected = run_unsplit_step(twin, [inputs], y, F.cross_entropy, MICROBATCHES)
                model.zero_grad()
                twin.zero_grad()
                found = compare(run_pipeline_step(pipe, [inputs], y), expected)
                # Deferred batch norm is to leave other statistics than the unsplit model, so buffers are left out.
                worst = max(worst, found.output, found.gradient)
                steps += 1
    return steps, worst
