"""Items of containers: copied, compared, and put back entry by entry.

A container is never emptied to be filled again: another thread, or an interrupt in between, would find it empty. So
only the entries that differ are written, and all of them from C, where neither comes in between.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from functools import partial
from operator import is_
from typing import Any

from fxsplit.ir.facts.python_state import ABSENT, same
from fxsplit.torch_internals.undo import call_all

CONTAINERS = (list, dict, set, deque)
"""The types of containers whose content can be put back."""

OF_PYTHON = "__builtins__"
"""The entry that Python itself adds to a dict in which it evaluates a text."""

Stays = Callable[[Any, Any], bool]
"""Tells from the value of an entry before a call and its value now whether the entry stays as it is now."""


def copy_items(container: Any) -> tuple[Any, ...]:
    """Return what a container holds, in its order."""
    if isinstance(container, Mapping):
        items = tuple(container.items())
        return tuple(item for item in items if item[0] != OF_PYTHON) if OF_PYTHON in container else items
    # The order of a set depends on the addresses of its items.
    return (frozenset(container),) if isinstance(container, set) else tuple(container)


def has_items(container: Any, before: tuple[Any, ...]) -> bool:
    """Return whether a container holds the same objects as when `copy_items` returned `before`, in the same order."""
    if isinstance(container, dict):
        keys, values = zip(*before, strict=True) if before else ((), ())
        return (
            len(container) == len(before)
            and all(map(is_, container, keys))
            and all(map(is_, container.values(), values))
        )
    if isinstance(container, set):
        return set(map(id, container)) == set(map(id, before[0]))
    return len(container) == len(before) and all(map(is_, container, before))


def put_items_back(container: Any, before: tuple[Any, ...], stays: Stays = lambda then, now: False) -> None:
    """Let a container hold again what `copy_items` returned of it, but for the entries of a dict that are to stay."""
    if isinstance(container, dict):
        call_all(_plan_entries(container, before, stays))
    elif isinstance(container, set):
        (items,) = before
        there = set(map(id, container))
        writes = [partial(set.update, container, items), partial(set.difference_update, container, container - items)]
        # In place of an item there may be another object that equals it.
        other = [item for item in items if item in container and id(item) not in there]
        call_all([*writes, *(partial(write, container, item) for item in other for write in (set.discard, set.add))])
    elif isinstance(container, deque):
        pairs = zip(range(len(container)), before, container, strict=False)
        writes = [partial(deque.__setitem__, container, i, then) for i, then, now in pairs if then is not now]
        shorter = [partial(deque.pop, container)] * max(0, len(container) - len(before))
        call_all([*writes, *shorter, partial(deque.extend, container, before[len(container) :])])
    else:
        count = min(len(container), len(before))
        begin = next((i for i in range(count) if container[i] is not before[i]), count)
        if begin < max(len(container), len(before)):
            list.__setitem__(container, slice(begin, None), before[begin:])


def _plan_entries(held: dict[Any, Any], before: tuple[Any, ...], stays: Stays) -> list[Callable[[], Any]]:
    """Return the writes after which a dict holds what it held `before`, in that order."""
    # The methods of a class of the user's may do more than write; those of dict leave out an OrderedDict's order.
    kind: Any = OrderedDict if isinstance(held, OrderedDict) else dict
    now, wanted = dict(kind.items(held)), dict(before)
    changed = {k: v for k, v in now.items() if v is not wanted.get(k, ABSENT)}
    # While a model is traced, a key may be a length of a stand-in, which compares with nothing.
    wanted |= {
        k: v for k, v in changed.items() if (isinstance(k, str) and k == OF_PYTHON) or stays(wanted.get(k, ABSENT), v)
    }
    writes: list[Callable[[], Any]] = [
        partial(kind.__setitem__, held, k, v) for k, v in wanted.items() if now.get(k, ABSENT) is not v
    ]
    writes += [partial(kind.__delitem__, held, key) for key in now if key not in wanted]
    order = [*(key for key in now if key in wanted), *(key for key in wanted if key not in now)]
    moved = next((i for i, (a, b) in enumerate(zip(order, wanted, strict=True)) if a is not b), len(order))
    for key in [*wanted][moved:]:
        # At least one other entry is there in between.
        writes += [partial(kind.__delitem__, held, key), partial(kind.__setitem__, held, key, wanted[key])]
    return writes


def merge_items(
    container: Any, before: tuple[Any, ...], begin: tuple[Any, ...], end: tuple[Any, ...], *, new_only: bool
) -> tuple[Any, ...]:
    """Return the items of `before` with the changes from `begin` to `end`, or only with the new entries."""
    if same(begin, end):
        return before
    if isinstance(container, Mapping):
        first, last, merged = dict(begin), dict(end), dict(before)
        merged |= {k: v for k, v in last.items() if k not in first or not (new_only or same(first[k], v))}
        return tuple((k, v) for k, v in merged.items() if new_only or k in last or k not in first)
    if new_only:
        return before
    if isinstance(container, set):
        return ((before[0] | (end[0] - begin[0])) - (begin[0] - end[0]),)
    grown = len(end) >= len(begin) and all(map(is_, begin, end))
    return (*before, *end[len(begin) :]) if grown else end
