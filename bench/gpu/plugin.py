"""pytest plugin: run the tests of CPU devices on one GPU.

    python -m pytest -p bench.gpu.plugin tests/...      # FXSPLIT_ON=cuda:0 unless it says otherwise

Tensors and modules are made on the GPU by default. If a test asks for a number of devices, or for "cpu", it gets the
GPU, as many times. Tests that are about the CPU itself are left out, see not_on_gpu.py.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bench.gpu.not_on_gpu import find_reason
from fxsplit.ir.facts.given.machine import Device, Machine

# Read at import, because pytest loads plugins before it reads its options.
ON = os.environ.get("FXSPLIT_ON", "cuda:0")
find_machine = Machine.of


def _to_gpu(device: Any) -> Any:
    """Return the GPU for a device on the CPU, and any other device as it is."""
    if isinstance(device, Device) and device.torch_device is not None and device.torch_device.type == "cpu":
        return replace(device, torch_device=torch.device(ON))
    return ON if isinstance(device, (str, torch.device)) and str(device).startswith("cpu") else device


def find_machine_on_gpu(devices: Any, **stated: Any) -> Machine:
    """Return the machine meant by `devices`, with the GPU in place of every CPU device."""
    # Wrong values go through unchanged, so that tests of errors see the same errors.
    if isinstance(devices, int) and not isinstance(devices, bool) and devices >= 1:
        devices = [ON] * devices
    elif isinstance(devices, (list, tuple)):
        devices = [_to_gpu(device) for device in devices]
    elif isinstance(devices, Machine):
        devices = replace(devices, devices=tuple(_to_gpu(device) for device in devices.devices))
    else:
        devices = _to_gpu(devices)
    return find_machine(devices, **stated)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that no GPU can run."""
    left_out = [item for item in items if find_reason(item.nodeid)]
    items[:] = [item for item in items if not find_reason(item.nodeid)]
    config.hook.pytest_deselected(items=left_out)


def pytest_configure(config: pytest.Config) -> None:
    """Map devices for the whole session."""
    mapping = patch.object(Machine, "of", staticmethod(find_machine_on_gpu))
    mapping.start()
    config.add_cleanup(mapping.stop)
    torch.set_default_device(ON)
    # None: naming the default device again would leave a mode in place, under which every function runs.
    config.add_cleanup(lambda: torch.set_default_device(None))
