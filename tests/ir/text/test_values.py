"""Values as text: every value comes back as it went in, and wrong text is named with line and column."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit.errors import IRSyntaxError
from fxsplit.ir.text.tokens import Tokens
from fxsplit.ir.text.values import DeviceName, Opaque, TorchName, read_value, write_name, write_value, write_word

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False),
    st.text(max_size=12),
    st.just(...),
    st.sampled_from([TorchName("float32"), TorchName("channels_last"), DeviceName("cuda:1"), Opaque("<object>")]),
)
keys = st.one_of(st.text(max_size=6), st.integers(-99, 99))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.builds(slice, inner, inner, inner),
    ),
    max_leaves=12,
)


def read(text: str) -> Any:
    """Return the value that is all of a text."""
    tokens = Tokens(text, "a.ir")
    value = read_value(tokens)
    assert tokens.next.kind == "end"
    return value


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal in value and type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same([*one.items()], [*other.items()])
    if isinstance(one, slice):
        return all(same(getattr(one, n), getattr(other, n)) for n in ("start", "stop", "step"))
    return bool(one == other) and math.copysign(1, one) == math.copysign(1, other) if one == 0.0 else bool(one == other)


@given(values)
def test_every_value_comes_back(value: Any) -> None:
    assert same(read(write_value(value)), value)
    assert same(read(write_word(value)), value)


@given(st.text(min_size=1, max_size=12))
def test_every_name_comes_back(name: str) -> None:
    tokens = Tokens(write_name(name), "a.ir")
    assert read_value(tokens, lambda found, token: found) == name


def test_constants_and_words() -> None:
    assert write_word(["a", "1F1B", "true", "1.5", "a b", "", -0.0, math.inf, -math.inf]) == (
        '[a, 1F1B, "true", "1.5", "a b", "", -0.0, inf, -inf]'
    )
    assert write_value("a") == '"a"' and write_value((1,)) == "(1,)"
    assert write_value({"k": [1, None]}) == '{"k": [1, none]}' and write_value(slice(None, 2)) == "slice(none, 2, none)"
    assert write_value(TorchName("float32")) == "#float32" and write_value(DeviceName("cpu")) == 'device("cpu")'
    assert math.isnan(read("nan")) and read("  1e3 ") == 1000.0 and read("[1,2,]") == [1, 2]
    # A value that has no text keeps its repr, so that a graph with it can be read and planned.
    assert read(write_value(range(3))) == Opaque("range(0, 3)")
    assert read("[1, ; a comment\n 2]") == [1, 2]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "a.ir:1:1: a value is missing before the end of the text"),
        ("[1 2]", "a.ir:1:4: a comma or ']' is missing before '2'"),
        ("(1", "a.ir:1:3: a comma or ')' is missing before the end of the text"),
        ('"a', "a.ir:1:1: '\"a' begins nothing: the string does not end on its line"),
        ('"\\q"', "is no string"),
        ("%a", "a.ir:1:1: %a is a node, and there are no nodes here: write its name without %"),
        ("device(1)", "a.ir:1:1: device(...) needs one string"),
        ("slice(1)", "a.ir:1:1: slice(...) needs three values"),
        ("1e999", "1e999 is too large for a number: write inf"),
        ("{1: 2, 1: 3}", "1 appears twice"),
        ("{[]: 2}", "a key must be a word, a string or a number"),
        ("{1 2}", "a key needs ':' here, and not '2'"),
        ("{1: 2 3}", "a comma or '}' is missing before '3'"),
        ("!!", "'!!' is no value: put a text in quotes"),
        ("[" * 101, "more than 100 brackets inside each other"),
    ],
)
def test_wrong_text_is_named(text: str, error: str) -> None:
    with pytest.raises(IRSyntaxError) as raised:
        read(text)
    assert error in str(raised.value)


def test_braces_inside_each_other_are_refused_before_python_is_exhausted() -> None:
    with pytest.raises(IRSyntaxError, match="more than 100 brackets"):
        read("{1: " * 5000)
