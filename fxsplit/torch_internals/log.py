"""Hide what a package warns of or logs as a warning, while something else tells the user what there is to know."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fxsplit.torch_internals.undo import undo_after


@contextmanager
def hide_logged_warnings(package: str) -> Iterator[None]:
    """Hide warnings and errors that a package logs inside the block, in this thread; what is less is shown as ever.

    A handler writes to the stream that there was when it was made, so redirecting standard error hides nothing of it.
    """
    mine = threading.get_ident()

    def is_shown(record: logging.LogRecord) -> bool:
        return record.thread != mine or record.levelno < logging.WARNING

    handlers = _list_handlers(package)

    def show() -> None:
        for handler in handlers:
            handler.removeFilter(is_shown)

    with undo_after(show):
        for handler in handlers:
            handler.addFilter(is_shown)
        yield


@contextmanager
def hide_warnings() -> Iterator[None]:
    """Hide Python's warnings inside the block."""
    with undo_after(partial(setattr, warnings, "filters", warnings.filters)), warnings.catch_warnings(action="ignore"):
        yield


def _list_handlers(package: str) -> list[logging.Handler]:
    """Return the handlers of a package's logger and of all below it, each once."""
    names = [name for name in logging.root.manager.loggerDict if f"{name}.".startswith(f"{package}.")]
    return list(dict.fromkeys(handler for name in names for handler in logging.getLogger(name).handlers))
