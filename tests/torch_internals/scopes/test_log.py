"""Hiding a package's log messages lasts for a block and affects only its thread."""

from __future__ import annotations

import io
import logging
import threading
import warnings

import pytest

from fxsplit.torch_internals.scopes.log import hide_logged_warnings, hide_warnings


def test_warnings_are_hidden_in_the_block_and_in_its_thread() -> None:
    stream = io.StringIO()
    handler, log = logging.StreamHandler(stream), logging.getLogger("fxsplit_test.inner")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    with hide_logged_warnings("fxsplit_test"):
        log.warning("hidden")
        log.error("hidden")
        log.info("information")
        other = threading.Thread(target=log.warning, args=("of another thread",))
        other.start()
        other.join()
    log.warning("afterwards")
    assert stream.getvalue().split("\n") == ["information", "of another thread", "afterwards", ""]
    assert not handler.filters


def test_no_handler_is_changed() -> None:
    """The code of a model may hold a logger, by which all handlers can be found."""
    handler, log = logging.StreamHandler(io.StringIO()), logging.getLogger("fxsplit_test.held")
    log.addHandler(handler)
    with hide_logged_warnings("fxsplit_test"):
        assert not handler.filters and log.handlers == [handler] and not log.filters


def test_packages_with_a_like_name_are_shown() -> None:
    stream = io.StringIO()
    log = logging.getLogger("fxsplit_testing")
    log.addHandler(logging.StreamHandler(stream))
    log.propagate = False
    with hide_logged_warnings("fxsplit_test"):
        log.warning("shown")
    assert stream.getvalue() == "shown\n"


def test_warnings_are_hidden_inside_the_block_alone() -> None:
    filters = warnings.filters
    with hide_warnings():
        warnings.warn("hidden", stacklevel=1)
    assert warnings.filters is filters
    with pytest.warns(UserWarning, match="shown"):
        warnings.warn("shown", stacklevel=1)
