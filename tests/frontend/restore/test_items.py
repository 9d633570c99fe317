"""Items of containers go back entry by entry, and nobody ever meets a container without its items."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fxsplit.frontend.restore.items import copy_items, count_items, has_items, list_items, merge_items, put_items_back
from fxsplit.frontend.restore.library_objects import is_namespace
from fxsplit.ir.facts.capture.python_state import is_plain, same


class Watched(dict[str, int]):
    """Refuses a method of the user's class that the restoring code must not call."""

    def __setitem__(self, key: str, value: int) -> None:
        raise AssertionError("what a class of the user's does when it is written to is none of the put-back")


class Refuses:
    """Refuses to be read, so its contents must be read without its own methods."""

    def _refuse(self, *_: Any) -> Any:
        raise NotImplementedError("ask another way")

    __len__ = __iter__ = __contains__ = items = values = keys = _refuse


class RefusingDict(Refuses, dict[str, int]):
    pass


class RefusingList(Refuses, list[int]):
    pass


class RefusingSet(Refuses, set[int]):
    pass


class RefusingTuple(Refuses, tuple[int, ...]):
    pass


def test_a_container_is_read_past_the_methods_of_its_class() -> None:
    held = RefusingTuple((1, 2))
    assert count_items(held) == 2 and list_items(held) == (1, 2) and is_plain(held)
    assert same(held, RefusingTuple((1, 2))) and not same(held, RefusingTuple((1, 3)))
    changes: list[tuple[Any, Callable[[Any], Any]]] = [
        (RefusingDict(a=1, b=2), lambda v: dict.update(v, a=3, c=4)),
        (RefusingList([1, 2]), lambda v: list.append(v, 3)),
        (RefusingSet([1, 2]), lambda v: set.add(v, 3)),
    ]
    for container, change in changes:
        before = copy_items(container)
        change(container)
        assert not has_items(container, before)
        put_items_back(container, before)
        assert has_items(container, before)
        assert not is_namespace(container)


class Unlike:
    """A key that compares with nothing, as a length of a stand-in for a tensor."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise TypeError(other)


KEY, LENGTH = object(), Unlike()
CHANGES: list[tuple[Any, Callable[[Any], Any]]] = [
    ({"a": 1, "b": [2]}, lambda v: v.update(a=3, c=4)),
    ({"a": 1, "b": 2, "c": 3}, lambda v: v.update(a=v.pop("a"))),
    ({"a": 1, "b": 2}, lambda v: v.clear()),
    (collections.OrderedDict(a=1, b=2), lambda v: (v.move_to_end("a"), v.update(c=3))),
    (collections.OrderedDict(a=1, b=2), lambda v: v.popitem()),
    ({"a": 1}, lambda v: v.update({LENGTH: 2})),
    ({LENGTH: 1, "a": 2}, lambda v: v.pop(LENGTH)),
    (collections.Counter("aab"), lambda v: v.update("b")),
    (collections.defaultdict(list, a=[1]), lambda v: v["b"].append(2)),
    (Watched(a=1), lambda v: v.update(a=2, b=3)),
    ([1, 2, 3], lambda v: v.insert(1, 9)),
    ([1, 2, 3], lambda v: v.clear()),
    ([[1], [2]], lambda v: v.reverse()),
    ({1, 2, KEY}, lambda v: (v.discard(KEY), v.add(3))),
    (collections.deque([1, 2, 3], maxlen=3), lambda v: v.append(4)),
    (collections.deque([1, 2, 3]), lambda v: (v.popleft(), v.rotate(1))),
]


@pytest.mark.parametrize(("container", "change"), CHANGES)
def test_a_container_holds_again_what_it_held(container: Any, change: Callable[[Any], Any]) -> None:
    before = copy_items(container)
    change(container)
    assert not has_items(container, before)
    put_items_back(container, before)
    assert has_items(container, before) and copy_items(container) == before
    # An OrderedDict has its order in a second place.
    assert list(container) == [k for k, _ in before] if isinstance(container, dict) else True


def test_an_equal_item_gives_way_to_the_one_of_before() -> None:
    first, second = (1, 2.0), (1, 2)
    held = {first}
    before = copy_items(held)
    held.discard(first)
    held.add(second)
    put_items_back(held, before)
    assert [type(item[1]) for item in held] == [float]


@pytest.mark.parametrize(
    ("container", "change"),
    [
        ({str(i): i for i in range(50)}, lambda v: v.update(x=1)),
        (list(range(50)), lambda v: v.append(1)),
        (set(range(50)), lambda v: v.add(99)),
        (collections.deque(range(50)), lambda v: v.append(1)),
    ],
)
def test_no_other_thread_meets_it_empty(container: Any, change: Callable[[Any], Any]) -> None:
    """A table was emptied and filled again: Python's built-in names were gone in between, and the process died."""
    before, least, over = copy_items(container), [len(container)], threading.Event()

    def look() -> None:
        while not over.is_set():
            least[0] = min(least[0], len(container))

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(300):
        change(container)
        put_items_back(container, before)
    over.set()
    thread.join()
    assert least[0] >= 50 and has_items(container, before)


def test_what_python_adds_to_a_namespace_stays() -> None:
    held: dict[str, Any] = {"K": 2}
    before = copy_items(held)
    eval("K", held)
    assert copy_items(held) == before
    put_items_back(held, before)
    assert "__builtins__" in held


def test_entries_may_stay() -> None:
    held = {"a": 1, "b": 2}
    before = copy_items(held)
    held |= {"a": 5, "new": 3}
    put_items_back(held, before, lambda then, now: now == 3)
    assert held == {"a": 1, "b": 2, "new": 3}


@pytest.mark.parametrize(
    ("container", "before", "begin", "end", "merged", "new"),
    [
        ({}, (("a", 1),), (("a", 2),), (("a", 2), ("b", 3)), (("a", 1), ("b", 3)), (("a", 1), ("b", 3))),
        ({}, (("a", 1),), (("a", 2),), (("a", 3),), (("a", 3),), (("a", 1),)),
        ({}, (("a", 1),), (("a", 1),), (), (), (("a", 1),)),
        ([], (1,), (1, 2), (1, 2, 3), (1, 3), (1,)),
        ([], (1,), (1, 2), (5,), (5,), (1,)),
        (set(), (frozenset({1}),), (frozenset({1, 2}),), (frozenset({2, 3}),), (frozenset({3}),), (frozenset({1}),)),
    ],
)
def test_changes_are_merged(container: Any, before: Any, begin: Any, end: Any, merged: Any, new: Any) -> None:
    assert merge_items(container, before, begin, end, new_only=False) == merged
    assert merge_items(container, before, begin, end, new_only=True) == new
