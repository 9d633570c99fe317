"""A made-up kind of device, `toy`, which torch treats as an accelerator of another vendor (PrivateUse1).

torch allows a process one such kind, and it stays registered. Outside of `use_accelerator` there are no toys: none is
counted, and none is found.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils import backend_registration

NAME = "toy"
COUNT = 4


class Toys:
    """The module that is installed as `torch.toy`: the devices, the thread's current device, and the generators."""

    def __init__(self) -> None:
        self.present = False
        self.default_generators = [Generator() for _ in range(COUNT)]
        self._current = threading.local()

    def is_initialized(self) -> bool:
        return self.present

    def is_available(self) -> bool:
        return self.present

    def is_bf16_supported(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return COUNT if self.present else 0

    def current_device(self) -> int:
        return int(getattr(self._current, "index", 0))

    def set_device(self, device: Any) -> None:
        self._current.index = find_index(device)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def manual_seed(self, seed: int) -> None:
        self.default_generators[self.current_device()].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.default_generators[find_index(device)].get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.default_generators[find_index(device)].set_state(state)


toys = Toys()


class _Hook(backend_registration._DummyPrivateUse1Hook):
    """torch's engine asks whether a device is in use before it looks for the device's streams."""

    def is_available(self) -> bool:
        return toys.present


@cache
def register() -> None:
    """Register the kind of device with torch, once for the process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=toys, hook=_Hook())


def find_index(device: Any) -> int:
    """Return the number of a device in any form that torch accepts; None is the current device."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return toys.current_device() if index is None else index


def find_device(device: Any) -> torch.device:
    """Return a device with its number."""
    return torch.device(NAME, find_index(device))
