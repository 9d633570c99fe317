"""Hide what a package warns of or logs as a warning, while something else tells the user what there is to know."""

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
    """Hide warnings and errors that a package logs inside the block, in this thread; what is less is shown as ever.

    A handler writes to the stream that there was when it was made, so redirecting standard error hides nothing of it.
    And no handler is changed: a model's code may hold loggers, and what it reads must not change as it is captured.
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
