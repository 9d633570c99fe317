"""Calls as flat lists of named values."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest

from fxsplit.errors import InputError
from fxsplit.ir.facts.capture.call import flatten_call


def function(x: Any, y: Any = 7, *more: Any, z: Any = None) -> None: ...


SIGNATURE = inspect.signature(function)


def test_every_way_of_passing_is_the_same_call() -> None:
    one = flatten_call(SIGNATURE, (1, 7), {})
    assert one == flatten_call(SIGNATURE, (), {"y": 7, "x": 1}) == flatten_call(SIGNATURE, (1,), {})
    names, values, _, roots = one
    assert names == ["x", "y", "z"] and values == [1, 7, None] and roots == ["x", "y", "z"]


def test_names_are_paths_and_differ() -> None:
    @dataclass
    class Pair:
        left: int
        right: int

    names, _, _, roots = flatten_call(SIGNATURE, ({"a b": [1, 2]}, Pair(3, 4), 5), {})
    assert names == ["x_a_b_0", "x_a_b_1", "y_left", "y_right", "more_0", "z"]
    assert roots == ["x", "x", "y", "y", "more", "z"]
    clash = inspect.signature(lambda x, x_0: None)
    assert flatten_call(clash, ([1], 2), {})[0] == ["x_0", "x_0_"]


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"do not fit forward\(x: .*: missing a required argument: 'x'"):
        flatten_call(SIGNATURE, (), {})
