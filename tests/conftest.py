"""Fixtures for all tests: seeds, two intra-op threads at most, and no worker thread left behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    gc.collect()
    left = [t.name for t in threading.enumerate() if t.name.startswith("fxsplit-worker")]
    assert not left, f"worker threads outlive their pipeline: {left}"
