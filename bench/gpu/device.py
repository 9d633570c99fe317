"""Describe the GPU under test: a figure without its device, driver and clock says little."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from typing import Any

import torch

ASKED = {
    "name": "name",
    "driver_version": "driver",
    "clocks.sm": "clock now, MHz",
    "clocks.max.sm": "clock at most, MHz",
    "power.limit": "power limit, W",
    "memory.total": "memory, MiB",
}
"""The fields of an nvidia-smi query, and their names in the report."""


def describe_device(dry: bool) -> dict[str, Any]:
    """Return the GPU with its driver and clocks, the versions of torch, CUDA and Python, the cores and the date."""
    told = {"name": f"CPU ({platform.machine()})"} if dry else ask_driver()
    return told | {
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda or torch.version.hip),
        "Python": platform.python_version(),
        "cores": os.cpu_count(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def ask_driver() -> dict[str, str]:
    """Return nvidia-smi's answers about the first GPU, or torch's properties of it if nvidia-smi is missing."""
    command = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        line = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {"name": torch.cuda.get_device_name(0)}
    return dict(zip(ASKED.values(), (value.strip() for value in line.split(",")), strict=False))
