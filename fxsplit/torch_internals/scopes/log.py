"""Hide the warnings that a package raises or logs, if something else reports the problem to the user."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fxsplit.torch_internals.scopes.patch import Method, patch_method
from fxsplit.torch_internals.scopes.undo import restore_after


@contextmanager
def hide_logged_warnings(package: str) -> Iterator[None]:
    """Hide warnings and errors that a package logs in this thread inside the block. Lower levels are shown as usual.

    Redirecting stderr would not work, since a handler keeps the stream that existed when it was made. Handlers are not
    changed either: a model's code may read its loggers, and must see no difference while it is captured.
    """

    def wrap(call_handlers: Method) -> Method:
        def called(logger: logging.Logger, record: logging.LogRecord) -> None:
            inside = f"{record.name}.".startswith(f"{package}.")
            if record.levelno < logging.WARNING or not inside:
                call_handlers(logger, record)

        return called

    with patch_method(logging.Logger, "callHandlers", wrap):
        yield


@contextmanager
def hide_warnings() -> Iterator[None]:
    """Hide Python's warnings inside the block."""
    with (
        restore_after(partial(setattr, warnings, "filters", warnings.filters)),
        warnings.catch_warnings(action="ignore"),
    ):
        yield
