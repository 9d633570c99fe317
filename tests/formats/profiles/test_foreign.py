"""Shared by formats of other tools: a topological order of a file's nodes."""

from __future__ import annotations

import pytest

from fxsplit.errors import ProfileError
from fxsplit.formats.profiles.foreign import sort_topologically


def test_each_node_stands_behind_what_it_needs() -> None:
    before = {"loss": ["b", "a"], "b": ["a"], "a": [], "free": []}
    order = sort_topologically(before, "file")
    assert sorted(order) == sorted(before)
    assert all(order.index(need) < order.index(name) for name, needs in before.items() for need in needs)
    assert order == sort_topologically(dict(before), "file")


def test_a_cycle_is_named_with_its_file() -> None:
    with pytest.raises(ProfileError, match=r"'file' has a cycle \((a -> b -> a|b -> a -> b)\)"):
        sort_topologically({"a": ["b"], "b": ["a"], "c": ["a"]}, "file")
