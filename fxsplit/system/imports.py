"""Import modules so that Ctrl-C never leaves a half-imported package.

If an import is interrupted, Python forgets the package but keeps its submodules. The next import finds the submodules,
does not run them again, and the package lacks them as attributes: code that needs the package fails from then on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

_asked: set[str] = set()


def import_whole(names: Sequence[str], *, if_there: bool = False) -> list[ModuleType]:
    """Import modules in a separate thread, which Ctrl-C cannot interrupt, and return the modules.

    A KeyboardInterrupt that comes meanwhile is raised after the imports. `if_there`: skip modules that do not exist.
    Otherwise the error of the first failing import is raised.
    """
    missing = [name for name in names if name not in _asked and not _is_loaded(name)]
    # Only the main thread receives interrupts.
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


def import_above(name: str) -> ModuleType:
    """Return a module of a room above the caller's, `name` without the package: results of lower rooms are drawn there.

    Only methods that show a result use this, and only when they are called: the lower room works without the upper one.
    """
    return import_module(f"fxsplit.{name}")


def _is_loaded(name: str) -> bool:
    """Return whether a module is fully imported, not in the middle of its import."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _import_all(names: Sequence[str], over: threading.Event) -> None:
    """Import modules one by one, then set `over`.

    Ignore errors: the caller imports the modules again and raises them.
    """
    try:
        for name in names:
            try:
                import_module(name)
            except Exception:
                continue
    finally:
        over.set()
