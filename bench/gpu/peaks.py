"""Measure the peak memory of a run, and compare it with its plan.

On a GPU torch's allocator keeps the peak. A dry run reads the peak of the process from Linux, with large tensors on
pages of their own.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from math import nan
from pathlib import Path

import torch
from torch import nn

from bench.gpu.setting import Setting
from fxsplit.api.pipeline.pipeline import Pipeline

GIB = 2**30
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MMAP_THRESHOLD, PAGES_OF_THEIR_OWN = -3, 1 << 16
"""glibc's option M_MMAP_THRESHOLD, and its value: larger blocks go back to the system as soon as they are freed."""
MOST, LEAST = 1.3, 0.5
"""Bounds of measured over planned peak: above, values live longer than planned; below, some are missing."""
DRY_MOST, DRY_LEAST = 2.5, 0.4
"""The same for a dry run: a process keeps some of the pages of freed tensors."""


def measure_peak_gib(setting: Setting, model: nn.Module, run: Callable[[], object]) -> float:
    """Return the peak memory of the model and `run` together, in GiB; NaN if it cannot be measured."""
    model.zero_grad()  # the run makes its own gradients
    setting.release_memory()
    if not setting.dry:
        torch.cuda.reset_peak_memory_stats()
        run()
        setting.synchronize()
        return torch.cuda.max_memory_allocated() / GIB
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, PAGES_OF_THEIR_OWN)
        libc.malloc_trim(0)
        RESET.write_text("5", encoding="ascii")  # restarts the peak at the present use of memory
        before = _read_peak_bytes()
    except (OSError, AttributeError):  # no Linux, another library than glibc, or a container that forbids it
        return nan
    run()
    # The weights existed before the run.
    held = sum(weight.nbytes for weight in [*model.parameters(), *model.buffers()])
    return (held + _read_peak_bytes() - before) / GIB


def _read_peak_bytes() -> int:
    """Return the most memory that the process has had at once since its peak was reset, in bytes."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(encoding="ascii"), re.MULTILINE)
    if found is None:
        raise OSError(f"{STATUS} does not state the peak")
    return 1024 * int(found[1])


def predict_gib(pipe: Pipeline) -> float:
    """Return the memory that the plan counts for all stages, in GiB, without the optimizer's: none is made here."""
    factor = pipe.plan.model.optimizer_factor
    return sum(stage.memory_bytes - factor * stage.parameter_bytes for stage in pipe.plan.stages) / GIB


def judge_peaks(found: Mapping[str, tuple[float, float]], *, dry: bool = False) -> tuple[bool, str]:
    """Return whether peaks are as planned, and a text with the ratios; `found` has peak and plan in GiB by run."""
    ratios = {name: peak / planned for name, (peak, planned) in found.items()}
    told = [f"{name}: {peak:.3f} GiB, {ratios[name]:.2f} of the plan" for name, (peak, _) in found.items()]
    most, least = (DRY_MOST, DRY_LEAST) if dry else (MOST, LEAST)
    # A NaN was not measured, and proves nothing.
    holds = not any(ratio > most or ratio < least for ratio in ratios.values())
    return holds, "; ".join(told)
