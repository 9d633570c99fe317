"""The runtime stays small: a warm step enters few files of the package, and few of its functions."""

from __future__ import annotations

import inspect
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxsplit
from fxsplit.torch_internals.autograd import sums as gradient_sums
from tests.support.models import FAST

PACKAGE = f"{Path(fxsplit.__file__).parent}/"
MOST_FILES, MOST_CALLS = 30, 500
UNCOUNTED = {"<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"}


def test_a_warm_step_enters_few_files_and_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages and four microbatches under 1F1B, in all threads. Each call counts, but not generators."""
    # As outside of tests, which add gradients at once from few bytes on.
    monkeypatch.setattr(gradient_sums, "LEAST_BYTES", 1 << 16)
    calls: Counter[tuple[str, str]] = Counter()
    listens = False

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        counted = code.co_name not in UNCOUNTED and not code.co_flags & inspect.CO_GENERATOR
        if listens and counted and event == "call" and code.co_filename.startswith(PACKAGE):
            calls[code.co_filename.removeprefix(PACKAGE), code.co_qualname] += 1

    layers = [nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    # The worker threads, which the first step starts.
    threading.setprofile(note)
    try:
        with fxsplit.compile(
            nn.Sequential(*layers),
            2,
            loss_fn=F.cross_entropy,
            n_microbatches=4,
            schedule="1F1B",
            example_inputs=x,
            passes=FAST.replace("partition", "partition{use_all=true}"),
        ) as pipe:
            for _ in range(3):
                pipe.step(x, target=y)
            assert len(pipe.stages) == 2
            before = sys.getprofile()
            sys.setprofile(note)
            listens = True
            pipe.step(x, target=y)
            listens = False
            sys.setprofile(before)
    finally:
        threading.setprofile(None)
    files = {file for file, _ in calls}
    shown = "\n".join(f"{count:4} {file} {name}" for (file, name), count in calls.most_common())
    assert "runtime/job/job.py" in files and calls["runtime/job/job.py", "Job._run_forward"] == 8
    assert len(files) <= MOST_FILES and calls.total() <= MOST_CALLS, f"{len(files)} files, {calls.total()}:\n{shown}"
