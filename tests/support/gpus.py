"""Stand-ins for GPUs on machines without one: answers of torch.cuda, and tensors that are on GPUs by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

FREE, RESERVED = 70_000_000_000, 5_000_000_000


class Elsewhere(torch.Tensor):
    """A tensor on a device that does not exist here, without values."""

    @staticmethod
    def on(device: str) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(Elsewhere, (2,), device=torch.device(device))
        assert isinstance(made, Elsewhere)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a tensor that stands for one on a device that is not here")


def place_on(device: str, model: nn.Module | None = None) -> nn.Module:
    """Return a model with a buffer on a device; the rest of the model stays in place."""
    model = nn.Linear(2, 2) if model is None else model
    model.register_buffer("elsewhere", Elsewhere.on(device))
    return model


def stand_in(monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0) -> None:
    """Let torch report `count` GPUs, each with FREE bytes free and RESERVED bytes in the allocator."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr("torch.cuda.current_device", lambda: current)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (FREE, FREE + RESERVED + 10**9))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: RESERVED)
