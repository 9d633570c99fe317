"""Queries to a fake accelerator driver: name, clock rate, a kernel of known length."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fxsplit.torch_internals.tensors.accelerators import describe, keep_until_read, occupy, pin

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def missing(device: torch.device) -> int:
    """Behave like torch without NVIDIA's management library."""
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


@pytest.mark.parametrize("pinned", [True, False])
def test_what_is_copied_from_is_not_the_callers(pinned: bool) -> None:
    """A loader that refills one pinned buffer overwrote values before the accelerator had read them."""
    empty_like, asked = torch.empty_like, []

    def make(like: Tensor, **options: Any) -> Tensor:
        asked.append(options)
        return empty_like(like)

    x = torch.arange(6.0).view(2, 3)[:, 1:]
    with (
        patch.object(Tensor, "is_pinned", lambda tensor: pinned),
        patch.object(Tensor, "pin_memory", Tensor.clone),
        patch.object(torch, "empty_like", make),
    ):
        found = pin(x)
        other = pin(x.to("meta"))
    assert torch.equal(found, x) and found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert asked == ([{"pin_memory": True}] if pinned else []) and other.is_meta


def test_memory_that_cannot_be_pinned_is_taken_as_it_is() -> None:
    def refuse(tensor: Tensor) -> Tensor:
        raise RuntimeError("Found no NVIDIA driver on your system")

    x = torch.ones(2)
    with patch.object(Tensor, "pin_memory", refuse), patch.object(Tensor, "is_pinned", lambda tensor: False):
        assert pin(x) is x


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr])
def test_the_memory_of_a_sparse_tensor_is_kept_by_its_parts(layout: torch.layout) -> None:
    """torch has no record_stream() for a sparse tensor: an argument of a stage on a GPU failed there."""
    kept: list[Tensor] = []
    sparse = torch.eye(3).to_sparse(layout=layout) if layout is not torch.strided else torch.eye(3)
    with patch.object(Tensor, "record_stream", lambda tensor, stream: kept.append(tensor)):
        keep_until_read(sparse, torch.Stream())
    assert len(kept) == {torch.strided: 1, torch.sparse_coo: 2, torch.sparse_csr: 3}[layout]
    assert all(part.layout is torch.strided for part in kept)
