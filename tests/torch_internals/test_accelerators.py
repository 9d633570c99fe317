"""What is asked of an accelerator's driver, which is made up: its name, its clock, a kernel of a known length."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from fxsplit.torch_internals.accelerators import describe, occupy

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def missing(device: torch.device) -> int:
    """What torch does where NVIDIA's library of clocks is not installed."""
    raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")


@pytest.mark.parametrize("clock", [lambda device: 1980, missing])
def test_a_clock_that_cannot_be_read_is_left_out(clock: object) -> None:
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}"))
        stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)))
        stack.enter_context(patch.object(torch.cuda, "clock_rate", clock))
        told = describe(GPU)
    assert told.pop("clock", None) == (None if clock is missing else "1980 MHz")
    assert told == {"device": "GPU 1", "capability": "compute capability 9.0"} and describe(CPU) == {}


def test_only_gpus_are_kept_busy() -> None:
    cycles: list[int] = []
    with patch.object(torch.cuda, "_sleep", cycles.append):
        occupy(GPU, 5)
        occupy(CPU, 7)
    assert cycles == [5]
