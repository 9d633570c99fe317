"""Patch a method of torch's for as long as a block lasts, and for one thread only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Method = Callable[..., Any]
# By class and name: the method as it was found, and by thread the functions that it calls instead, innermost last.
_patches: dict[tuple[type, str], tuple[Any, dict[int, list[Method]]]] = {}
_lock = threading.Lock()


@contextmanager
def patch_method(owner: type, name: str, around: Callable[[Method], Method]) -> Iterator[None]:
    """Let this thread's calls of a method go to what `around` returns for it. Other threads' calls are unchanged.

    `owner` defines the method itself, as a function or a classmethod. Blocks nest, and blocks of several threads may
    overlap in any way: the class has its own method again when the last block ends.
    """
    key, thread = (owner, name), threading.get_ident()
    with _lock:
        if key not in _patches:
            _patches[key] = owner.__dict__[name], {}
            setattr(owner, name, _make_dispatcher(*_patches[key]))
        own, instead = _patches[key]
        mine = instead.setdefault(thread, [getattr(own, "__func__", own)])
        mine.append(around(mine[-1]))
    try:
        yield
    finally:
        with _lock:
            mine.pop()
            # What is left is the method itself, which the thread's first block put there.
            if len(mine) == 1:
                del instead[thread]
            if not instead:
                setattr(owner, name, own)
                del _patches[key]


def _make_dispatcher(own: Any, instead: dict[int, list[Method]]) -> Any:
    """Return a method, or a classmethod, that calls the innermost patch of the calling thread."""
    plain = [getattr(own, "__func__", own)]  # a classmethod keeps its function there

    # No lock here: each thread changes only its own entry, and a read of a dictionary is whole.
    def call(*args: Any, **kwargs: Any) -> Any:
        return instead.get(threading.get_ident(), plain)[-1](*args, **kwargs)

    return classmethod(call) if isinstance(own, classmethod) else call
