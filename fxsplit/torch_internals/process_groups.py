"""Process groups of torch.distributed: what they do not say in public, and the words of their errors."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

TIMED_OUT = ("timed out", "timeout")
"""What gloo and NCCL say where a wait takes longer than it may."""


def read_timeout_s(group: Any, default_s: float) -> float:
    """Return how long the operations of a group may take, in seconds; the default where torch does not say."""
    for kind in ("cpu", "cuda"):
        # A group has a backend for each kind of device that it serves.
        with suppress(RuntimeError, AttributeError):
            return float(group._get_backend(torch.device(kind)).options._timeout.total_seconds())
    return default_s


def is_timeout(error: BaseException) -> bool:
    """Return whether a wait has failed because it took longer than it may."""
    return any(word in str(error).lower() for word in TIMED_OUT)
