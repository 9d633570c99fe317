"""Settings and fixtures for all tests: seeds and stated times; no worker thread and no mode outlives a test."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# Both are read when torch and numba are loaded. OpenMP's threads spin at barriers while they wait. If other processes
# use the cores too, a test takes many times as long with two threads as with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# All workers share one cache of numba's, in the checkout: each kernel is compiled once.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "numba"))

# A test that fails says all.
os.environ.setdefault("FXSPLIT_TRACEBACK", "full")

# A shell that starts a command in the background makes it ignore Ctrl-C, and child processes inherit that. Tests of
# interrupts, and the programs that they start, would never see one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack as list_modes

from fxsplit.schedule import choose_schedule
from fxsplit.torch_internals.autograd import split as grad_split
from fxsplit.torch_internals.autograd import sums as gradient_sums
from tests.support.times import measure_times, state_times

MANY = 100
"""How many new modules are loaded before their objects are frozen."""
_frozen = 0
END_S = 30.0
"""How long a worker may outlive its pipeline, on a busy machine: it ends by itself, on its own thread."""


def freeze_modules() -> None:
    """Exclude the objects of modules from garbage collection: collecting all of torch takes longer than most tests."""
    global _frozen
    if len(sys.modules) > _frozen + MANY:
        gc.collect()
        gc.freeze()
        _frozen = len(sys.modules)


def pytest_collection_finish() -> None:
    freeze_modules()


@pytest.fixture(autouse=True)
def modules_frozen() -> Iterator[None]:
    yield
    freeze_modules()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def small_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits for tests: their networks are tiny, and their backwards must be split in two all the same.

    Most weights, but no biases, are large enough to be caught.
    """
    monkeypatch.setattr(grad_split, "LEAST_PRODUCTS", defaultdict(int))
    monkeypatch.setattr(gradient_sums, "LEAST_BYTES", 200)


@pytest.fixture(autouse=True)
def stated_times(request: pytest.FixtureRequest) -> None:
    """A plan must depend on the test, and not on how busy the machine is."""
    if request.node.get_closest_marker("measured"):
        measure_times()
    else:
        state_times()


@pytest.fixture(autouse=True)
def only_named_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the search out when compile() chooses a schedule: it would end after a measured time."""
    monkeypatch.setattr(choose_schedule, "is_warm", lambda: False)


def list_workers() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("fxsplit-worker")}


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    # A failing test keeps its pipeline in its traceback, which must not fail later tests.
    before = list_workers()
    yield
    if list_workers() - before:  # with torch loaded, a collection takes longer than most tests
        gc.collect()
    for worker in list_workers() - before:
        worker.join(END_S)
    left = sorted(worker.name for worker in list_workers() - before)
    assert not left, f"worker threads outlive their pipeline: {left}"


@pytest.fixture(autouse=True)
def no_mode_left() -> Iterator[None]:
    """A mode of torch's functions that outlives its test, such as a default device, changes the tests after it."""
    before = len(list_modes())
    yield
    assert len(list_modes()) == before, f"modes outlive their test: {list_modes()}"
