"""Expect a refusal: an error of fxsplit's own, with the words that it must say."""

from __future__ import annotations

from typing import Any

import pytest

from fxsplit.errors import FxsplitError


def refused(error: type[Exception], message: str) -> Any:
    """Expect `error`, which must be a FxsplitError, with a text that matches `message`."""
    assert issubclass(error, FxsplitError)
    return pytest.raises(error, match=message)
