"""Compile functions over arrays to machine code."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache, wraps
from pathlib import Path
from typing import Any

from fxsplit.system.imports import import_whole

PATIENCE_S = 120.0
"""How long a process waits for another one that compiles the same kernel, before it compiles the kernel itself."""


@cache
def compile_kernel(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled kernel, from numba's on-disk cache if another process compiled it."""
    # numba takes about a second to import: do it only for compiling.
    import_whole(["numba"])
    from numba import njit

    machine_code: Any = njit(cache=True)(kernel)
    _forget_unreadable(machine_code._cache)
    machine_code.compile = _lock_out_others(machine_code)
    compiled: Callable[..., Any] = machine_code
    return compiled


def _forget_unreadable(files: Any) -> None:
    """Empty numba's cache of a kernel if its files cannot be read.

    The files name the classes of the kernel's arguments, and another version of fxsplit may have others. numba compares
    the time of the source only after it has read these names.
    """
    load: Callable[..., Any] = files.load_overload

    @wraps(load)
    def load_or_forget(signature: Any, target: Any) -> Any:
        try:
            return load(signature, target)
        except (AttributeError, ImportError, EOFError, pickle.UnpicklingError):
            files.flush()
            return None  # numba compiles, and writes the files again

    files.load_overload = load_or_forget


def _lock_out_others(machine_code: Any) -> Callable[..., Any]:
    """Return numba's `machine_code.compile`, which loads a signature or compiles it, for one process at a time.

    numba numbers the files of its cache without a lock. Two processes that compile two signatures of a kernel at once
    may take one number for both, and a later process loads the wrong code. With the lock, ranks that start together
    compile each kernel once, and not once each.
    """
    from filelock import FileLock
    from numba.core.compiler_lock import global_compiler_lock

    compile_signature: Callable[..., Any] = machine_code.compile
    folder, kernel = Path(machine_code.stats.cache_path), machine_code.py_func
    lock = FileLock(folder / f"{kernel.__module__}.{kernel.__name__}.lock", timeout=PATIENCE_S)

    @wraps(compile_signature)
    def compile_alone(signature: Any) -> Any:
        # numba compiles in one thread at a time. A thread that has that lock may wait for the file, but not vice versa.
        with global_compiler_lock, ExitStack() as held:
            # A process may be stopped with the lock, and some file systems have no locks.
            with suppress(OSError, NotImplementedError):
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(lock)
            return compile_signature(signature)

    return compile_alone
