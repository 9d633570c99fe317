"""Expect a refusal, which is one of fxsplit's own errors with a given text; and simulate a full disk."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fxsplit.errors import FxsplitError


def refused(error: type[Exception], message: str) -> Any:
    """Expect `error`, which must be a FxsplitError, with a text that matches `message`."""
    assert issubclass(error, FxsplitError)
    return pytest.raises(error, match=message)


@contextmanager
def full_disk(room: int = 1000) -> Iterator[None]:
    """Let no file grow beyond `room` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
