"""Patching: for as long as a block lasts, one thread's calls of a method of torch's go elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Method = Callable[..., Any]


@contextmanager
def patched(owner: type, name: str, around: Callable[[Method], Method]) -> Iterator[None]:
    """Let this thread's calls of a method go to what `around` returns of it; other threads' go where they went."""
    own = owner.__dict__[name]
    instead, thread = around(own), threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (instead if threading.get_ident() == thread else own)(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, own)
