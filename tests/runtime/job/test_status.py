"""The status of workers: during a step, after a timeout, and after an interrupt."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import BusyError, FxsplitError, InputError, StepTimeout
from fxsplit.runtime.backends import threads
from fxsplit.runtime.job.status import Status, WorkerStatus
from fxsplit.system.shown import WIDTH
from tests.support.models import FAST
from tests.support.programs import run
from tests.support.times import state_times

go_on = threading.Event()
inside = threading.Event()


def pause(x: Tensor) -> Tensor:
    inside.set()
    assert go_on.wait(60.0)
    return x * 1


torch.fx.wrap("pause")


class Pauses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(pause(self.first(x)))  # type: ignore[no-any-return]


@contextmanager
def pausing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a pipeline with a node `pause` that waits for `go_on`."""
    monkeypatch.setattr(threads, "GRACE_S", 0.05)
    go_on.set()
    x = torch.randn(4, 4)
    state_times(last=2.0)  # so that `pause` is in the first stage
    options: Any = {"n_microbatches": 2, "loss_fn": nn.functional.mse_loss, "passes": FAST}
    with fxsplit.compile(Pauses(), 2, example_inputs=x, **options) as pipe:
        try:
            assert str(pipe.status()).startswith("no workers yet")
            pipe.step(x, target=x)
            assert pipe.status().idle and [w.operation for w in pipe.status().workers] == ["idle", "idle"]
            go_on.clear()
            inside.clear()
            yield pipe
        finally:
            go_on.set()


def test_a_step_that_hangs_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the caller waited silently, and so did the next call."""
    x = torch.randn(4, 4)
    wait = threads.ThreadBackend._wait

    def wait_inside(self: threads.ThreadBackend, handle: Any, timeout_s: float) -> bool:
        # On a busy machine the limit may pass before the worker has begun.
        assert inside.wait(60.0)
        return wait(self, handle, timeout_s)

    with pausing(monkeypatch) as pipe:
        monkeypatch.setattr(threads.ThreadBackend, "_wait", wait_inside)
        before = [p.grad.clone() for p in pipe.parameters()]
        with pytest.raises(StepTimeout, match=r"timeout_s=0\.2:\n.*forward of microbatch 0, node 'pause'") as caught:
            pipe.step(x, target=x, timeout_s=0.2)
        assert isinstance(caught.value, TimeoutError) and isinstance(caught.value, FxsplitError)
        (busy,) = [worker for worker in pipe.status().workers if worker.stage is not None]
        assert (busy.operation, busy.microbatch, busy.waits) == ("forward", 0, False) and busy.seconds > 0.2
        assert f"{__file__}" in busy.node and not pipe.status().idle
        with pytest.raises(BusyError, match=r"not over yet:\n.*node 'pause'"):
            pipe(x)
        assert all(torch.equal(p.grad, g) for p, g in zip(pipe.parameters(), before, strict=True))
        go_on.set()
        monkeypatch.setattr(threads, "GRACE_S", 20.0)
        pipe.step(x, target=x, timeout_s=60)
        assert all(not torch.equal(p.grad, g) for p, g in zip(pipe.parameters(), before, strict=True))
        with pytest.raises(InputError, match="timeout_s=0 is no time"):
            pipe.step(x, target=x, timeout_s=0)


def test_what_each_worker_does_is_seen_from_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 4)
    with pausing(monkeypatch) as pipe:
        step = threading.Thread(target=lambda: pipe.step(x, target=x))
        step.start()
        assert inside.wait(60.0)
        lines = pipe.status().describe().splitlines()
        go_on.set()
        step.join()
    assert len(lines) == 2 and sum("node 'pause' from File" in line for line in lines) == 1
    (other,) = [line for line in lines if "pause" not in line]
    assert "waiting for another worker" in other or "idle" in other or re.search(r"for \d+\.\d s", other)


def test_a_status_reads_like_a_sentence() -> None:
    status = Status((WorkerStatus(0, "cpu:0", "forward", 0, 3, ", node 'h'", True, 1.25), WorkerStatus(1, "cpu:1")))
    assert status.describe() == (
        "worker 0 on cpu:0: stage 0, forward of microbatch 3, node 'h', waiting for another worker, for 1.2 s\n"
        "worker 1 on cpu:1: idle"
    )


def test_a_status_is_a_table() -> None:
    """Figures are those of the workers, and the user's line stands below."""
    node = ", node 'h' from File \"model.py\", line 7"
    status = Status((WorkerStatus(0, "cpu:0", "forward", 0, 3, node, True, 1.25), WorkerStatus(1, "cpu:1")))
    assert str(status).splitlines() == [
        "worker  device  does                               stage  microbatch    for",
        "     0  cpu:0   forward, waits for another worker      0           3  1.2 s",
        "     1  cpu:1   idle                                   -           -      -",
        "worker 0 is in node 'h' from File \"model.py\", line 7",
    ]
    assert repr(status) == "Status(2 workers, 1 busy)" and "<pre" in status._repr_html_()
    assert max(map(len, str(status).splitlines())) <= WIDTH


AT_EXIT = """
import os, sys, threading, torch, fxsplit
from torch import nn

class Long(nn.Module):
    on = False
    def forward(self, x):
        a = torch.ones(50, 50)
        for _ in range(10**9 if Long.on else 1):
            torch.mm(a, a)
        return x * 1

model, x = nn.Sequential(nn.Linear(4, 4), Long(), nn.Linear(4, 4)), torch.randn(4, 4)
pipe = fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, loss_fn=nn.functional.mse_loss,
                       passes=[fxsplit.leaf("1"), *fxsplit.DEFAULT])
pipe.step(x, target=x)
class Late:
    def __del__(self):
        try:
            pipe.step(x, target=x)
        except RuntimeError as error:
            # What is still buffered this late may never be written.
            os.write(1, type(error).__name__.encode())
if sys.argv[1] == "late":
    import builtins
    builtins.late = Late()
else:
    Long.on = True
    try:
        pipe.step(x, target=x, timeout_s=0.3)
    except TimeoutError:
        sys.stdout.write("timed out")
"""


@pytest.mark.parametrize(
    ("which", "said"), [("long", "timed out"), pytest.param("late", "ClosedError", marks=pytest.mark.long)]
)
def test_python_ends_while_workers_run(which: str, said: str) -> None:
    """Workers that ran on while Python was taken down aborted it; a step in a late `__del__` did, or hung."""
    done = run(AT_EXIT, which)
    assert (done.code, done.out) == (0, said), done.error
