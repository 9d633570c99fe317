"""Tracebacks that leave a public function show the user's lines, and few frames of fxsplit and of libraries."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fxsplit.system import tracebacks
from fxsplit.system.interrupts import lose_no_interrupt
from fxsplit.system.tracebacks import LAST, MOST
from fxsplit.system.user_lines import FXSPLIT


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests show all frames by default."""
    monkeypatch.delenv("FXSPLIT_TRACEBACK", raising=False)


def make(path: str, name: str) -> Callable[..., Any]:
    """Return a function of a file of this path that calls the first of its arguments with the others."""
    scope: dict[str, Any] = {}
    exec(compile(f"def {name}(first, *others):\n    return first(*others)\n", path, "exec"), scope)
    found: Callable[..., Any] = scope[name]
    return found


def fail() -> None:
    raise KeyError("x")


PUBLIC, INNER, CALLER = (make(f"{FXSPLIT}api/{name}.py", name) for name in ("public", "inner", "caller"))
LIBRARY, USER = make(json.__file__, "library"), make("/home/me/train.py", "user")


def list_names(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_the_public_function_the_users_code_its_caller_and_the_end_are_shown() -> None:
    calls = [INNER] * 5 + [LIBRARY, CALLER, USER, LIBRARY, INNER, INNER, LIBRARY, INNER, fail]
    with pytest.raises(KeyError) as caught:
        lose_no_interrupt(PUBLIC)(*calls)
    here = "test_the_public_function_the_users_code_its_caller_and_the_end_are_shown"
    assert list_names(caught.value) == [here, "public", "caller", "user", "library", "inner", "fail"]
    assert caught.value.__notes__ == [
        # The two frames of the decorator are left out too.
        "11 frames are left out: FXSPLIT_TRACEBACK=full in the environment shows them"
    ]


def test_all_frames_are_shown_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSPLIT_TRACEBACK", "full")
    with pytest.raises(KeyError) as caught:
        lose_no_interrupt(PUBLIC)(*[INNER] * 9, fail)
    assert list_names(caught.value).count("inner") == 9 and not hasattr(caught.value, "__notes__")


def test_causes_are_shortened_and_circles_of_them_end() -> None:
    def wrap(*calls: Callable[..., Any]) -> None:
        try:
            PUBLIC(*calls)
        except KeyError as error:
            found = ValueError("y")
            error.__context__ = found
            raise found from error

    with pytest.raises(ValueError, match="y") as caught:
        lose_no_interrupt(wrap)(*[INNER] * 6, USER, fail)
    cause = caught.value.__cause__
    assert cause is not None and list_names(cause) == ["wrap", "inner", "user", "fail"]
    assert not hasattr(cause, "__notes__"), "once is enough"


def test_a_public_function_in_a_public_function_counts_all_frames_once() -> None:
    inner = lose_no_interrupt(INNER)
    with pytest.raises(KeyError) as caught:
        lose_no_interrupt(PUBLIC)(CALLER, CALLER, inner, *[CALLER] * 6, fail)
    assert list_names(caught.value)[1:] == ["public", "caller", "caller", "fail"]
    assert len(caught.value.__notes__) == 1


def test_deep_code_of_the_users_does_not_fill_the_screen() -> None:
    with pytest.raises(KeyError) as caught:
        lose_no_interrupt(PUBLIC)(*[USER] * 50, fail)
    assert list_names(caught.value)[1:] == ["public", *["user"] * (MOST - 2), "fail"]


def test_a_short_traceback_stays_and_errors_of_fxsplit_have_no_note() -> None:
    class OwnError(Exception):
        __module__ = "fxsplit.errors"

    def refuse() -> None:
        raise OwnError

    with pytest.raises(KeyError) as short:
        lose_no_interrupt(PUBLIC)(fail)
    assert list_names(short.value)[1:] == ["public", "fail"]
    with pytest.raises(OwnError) as own:
        lose_no_interrupt(PUBLIC)(*[INNER] * 9, refuse)
    assert list_names(own.value)[1:] == ["public", *["inner"] * (LAST - 1), "refuse"]
    assert not hasattr(own.value, "__notes__")


@pytest.mark.parametrize(
    ("file", "inner"),
    [
        (f"{FXSPLIT}runtime/job/job.py", True),
        (json.__file__, True),
        ("<frozen runpy>", True),
        ("/home/me/torch/train.py", False),
        ("<eval_with_key>.3", False),
        (f"{Path(json.__file__).parent.parent}/site-packages/transformers/models.py", False),
    ],
)
def test_only_fxsplit_torch_and_python_are_inner(file: str, inner: bool) -> None:
    try:
        make(file, "there")(fail)
    except KeyError as error:
        entry = error.__traceback__
    assert entry is not None and entry.tb_next is not None
    assert tracebacks._is_telling(entry.tb_next) != inner
