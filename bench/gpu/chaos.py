"""Delay everything at random that streams pass to each other: a missing event then gives a wrong number."""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F

from bench.gpu.checks.equality import CLOSE
from bench.gpu.setting import FAST, MICROBATCHES, RECOMPUTING, Net, Setting
from fxsplit.api.verify.compare import compare, run_pipeline_step, run_unsplit_step
from fxsplit.runtime.stage.streams import AcceleratorStream, DeviceStream

MODES: tuple[dict[str, Any], ...] = ({}, {"passes": RECOMPUTING}, {"deferred_batch_norm": True})
STEPS = 3
LONGEST_CYCLES = 2e6
"""The longest delay: about a millisecond."""
DRY_S = 5.0
MORE_ROWS = 4
"""With a check's few rows, batch norm makes rounding errors a hundred times larger, in a few of thousands of steps."""
OFTEN = 0.3
"""The share of places that are delayed: if every place is late, all keep in step again."""


def run_chaos(setting: Setting, seconds: float = 65.0) -> int:
    """Take steps with delays under all schedules, for `seconds` seconds; return how many checks fail."""
    # The same delays each time, but threads reach them in another order: a failure may need several runs to come back.
    rng = random.Random(0)

    def delay(longest_cycles: float = LONGEST_CYCLES) -> None:
        if rng.random() < OFTEN:
            setting.occupy(rng.uniform(0, longest_cycles))

    with delay_streams(setting, delay):
        longest_s = DRY_S if setting.dry else 0.8 * setting.findings.seconds_left()
        steps, worst = _step_for(setting, min(seconds, longest_s), delay)
    setting.note("steps with delays", holds=worst < CLOSE, steps=steps, largest_difference=worst)
    return int(not worst < CLOSE)


@contextmanager
def delay_streams(setting: Setting, delay: Callable[[], None]) -> Iterator[None]:
    """Delay the work that is queued around each send, take and mark inside the block, and copies on their streams."""
    # A dry run uses the CPU's streams, where delays do nothing, so that it runs the same lines.
    kind: type[Any] = DeviceStream if setting.dry else AcceleratorStream

    def make_late(own: Callable[..., Any]) -> Callable[..., Any]:
        def late(*args: Any) -> Any:
            delay()
            result = own(*args)
            delay()
            return result

        return late

    with ExitStack() as stack:
        for name in ("mark", "send", "receive", "wait_for"):
            stack.enter_context(patch.object(kind, name, make_late(getattr(kind, name))))
        # A copy is queued between two changes of the current stream: delays go to the copy's own streams.
        where = "fxsplit.torch_internals.tensors.accelerators"
        if not setting.dry:
            stack.enter_context(patch(f"{where}.make_stream", lambda device: make_late_stream(delay)(device)))
        for name in ("set_current_stream", "keep_until_read"):
            own = getattr(__import__(where, fromlist=[name]), name)
            stack.enter_context(patch(f"{where}.{name}", make_late(own)))
        yield


def make_late_stream(delay: Callable[[], None], base: type[Any] = torch.Stream) -> type[Any]:
    """Return a subclass of the stream class `base` with late marks and waits."""

    class LateStream(base):  # type: ignore[misc]
        def record_event(self, *args: Any) -> Any:
            with self:
                delay()
            event = super().record_event(*args)
            # The stream is late after the event too: a stream that waits for the event must not need this later work.
            with self:
                delay()
            return event

        def wait_event(self, event: Any) -> None:
            super().wait_event(event)
            with self:
                delay()

    return LateStream


def list_placements(setting: Setting) -> list[list[str]]:
    """Return lists of devices: a single GPU for all stages, and devices between which values are copied."""
    gpu = setting.name
    found = [[gpu] * 2, [gpu] * 4, [gpu, "cpu"], ["cpu", gpu, "cpu", gpu]]
    if not setting.dry and torch.cuda.device_count() > 1:
        found += [[gpu, "cuda:1"], [gpu, "cuda:1"] * 2]
    return found


def _step_for(setting: Setting, seconds: float, delay: Callable[[float], None]) -> tuple[int, float]:
    """Take steps until the time is over; return how many, and their largest difference from the unsplit model."""
    batch = [torch.cat([values] * MORE_ROWS) for values in setting.make_batch()]
    end = time.monotonic() + seconds
    steps, worst = 0, 0.0
    turns = itertools.cycle(itertools.product(setting.schedules, MODES, list_placements(setting)))
    while steps == 0 or time.monotonic() < end:
        schedule, mode, devices = next(turns)
        # With stages on the CPU too, model and batch begin in host memory, and values are copied to the GPU and back.
        home = torch.device("cpu") if "cpu" in devices else setting.device
        model, x, y = Net().double().to(home), *(values.to(home) for values in batch)
        # The twin takes the same steps unsplit, so that statistics of batch norm go on from the same values.
        twin = copy.deepcopy(model)
        options = {"passes": FAST, "schedule": schedule, "example_inputs": x, "devices": devices, **mode}
        with setting.compile(model, len(devices), **options) as pipe:
            for _ in range(STEPS):
                delay(LONGEST_CYCLES / 2)
                # New inputs in each step: among equal inputs, a leftover value of the step before would go unnoticed.
                inputs = torch.randn_like(x)
                expected = run_unsplit_step(twin, [inputs], y, F.cross_entropy, MICROBATCHES)
                model.zero_grad()
                twin.zero_grad()
                found = run_pipeline_step(pipe, [inputs], y.to(devices[-1]))
                differences = compare(found, expected)
                # Deferred batch norm has other statistics than the unsplit model by design, so buffers are left out.
                worst = max(worst, differences.output, differences.gradient)
                steps += 1
    return steps, worst
