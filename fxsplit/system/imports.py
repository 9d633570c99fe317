"""Import modules such that Ctrl-C never leaves half of them.

A package whose import was interrupted is forgotten by Python, and its submodules are not. The next import finds those,
does not run them again, and the package lacks what they are: nothing that needs the package works any more.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

_asked: set[str] = set()


def import_whole(names: Sequence[str], *, if_there: bool = False) -> list[ModuleType]:
    """Return modules, imported in a thread of their own, which no Ctrl-C reaches: that comes when they are whole.

    if_there: leave out what cannot be found. Otherwise raises what the first import that fails raises.
    """
    missing = [name for name in names if name not in _asked and not _is_loaded(name)]
    # Only the main thread is interrupted.
    if missing and threading.current_thread() is threading.main_thread():
        over = threading.Event()
        thread = threading.Thread(target=_import_all, args=(missing, over), name="fxsplit-imports", daemon=True)
        try:
            thread.start()
            over.wait()
        except BaseException:
            if thread.is_alive():
                over.wait()
            raise
    _asked.update(names)
    found = []
    for name in names:
        try:
            found.append(import_module(name))
        except ModuleNotFoundError:
            if not if_there:
                raise
    return found


def _is_loaded(name: str) -> bool:
    """Return whether a module is imported, and not just being imported."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _import_all(names: Sequence[str], over: threading.Event) -> None:
    """Import modules one after the other, then say so. A failure is met again by who asked for the module."""
    try:
        for name in names:
            try:
                import_module(name)
            except Exception:
                continue
    finally:
        over.set()
