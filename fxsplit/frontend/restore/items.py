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

from fxsplit.ir.facts.capture.python_state import ABSENT, same
from fxsplit.torch_internals.scopes.undo import call_all

CONTAINERS = (list, dict, set, deque)
"""The types of containers whose content can be put back."""

KINDS = (OrderedDict, *CONTAINERS, tuple, frozenset)
"""The classes of Python's own containers; an OrderedDict has an order that the methods of dict do not know."""

OF_PYTHON = "__builtins__"
"""The entry that Python itself adds to a dict in which it evaluates a text."""

Stays = Callable[[Any, Any], bool]
"""Tells from the value of an entry before a call and its value now whether the entry stays as it is now."""


def find_kind(container: Any) -> Any:
    """Return the class of Python's own whose methods read a container; its own class for a Mapping of the user's.

    Methods of a class derived from it may do more than read, or refuse to.
    """
    own = type(container)
    if own in KINDS:
        return own
    return next((kind for kind in KINDS if isinstance(container, kind)), own)


def count_items(container: Any) -> int:
    """Return how many items a container holds."""
    return int(find_kind(container).__len__(container))


def list_items(container: Any) -> tuple[Any, ...]:
    """Return the items of a container in their order: pairs of keys and values for a Mapping."""
    kind = find_kind(container)
    return tuple(kind.items(container) if issubclass(kind, Mapping) else kind.__iter__(container))


def copy_items(container: Any) -> tuple[Any, ...]:
    """Return what a container holds, in its order."""
    items = list_items(container)
    if isinstance(container, Mapping):
        there = find_kind(container).__contains__(container, OF_PYTHON)
        return tuple(item for item in items if item[0] != OF_PYTHON) if there else items
    # The order of a set depends on the addresses of its items.
    return (frozenset(items),) if isinstance(container, set) else items


def has_items(container: Any, before: tuple[Any, ...]) -> bool:
    """Return whether a container holds the same objects as when `copy_items` returned `before`, in the same order."""
    if isinstance(container, dict):
        return count_items(container) == len(before) and all(
            a is b and v is w for (a, v), (b, w) in zip(list_items(container), before, strict=True)
        )
    now = list_items(container)
    if isinstance(container, set):
        return set(map(id, now)) == set(map(id, before[0]))
    return len(now) == len(before) and all(map(is_, now, before))


def put_items_back(container: Any, before: tuple[Any, ...], stays: Stays = lambda then, now: False) -> None:
    """Let a container hold again what `copy_items` returned of it, but for the entries of a dict that are to stay."""
    if isinstance(container, dict):
        call_all(_plan_entries(container, before, stays))
        return
    held = list_items(container)
    if isinstance(container, set):
        (items,) = before
        there = set(map(id, held))
        more = frozenset(held) - items
        writes = [partial(set.update, container, items), partial(set.difference_update, container, more)]
        # In place of an item there may be another object that equals it.
        other = [item for item in items if item in frozenset(held) and id(item) not in there]
        call_all([*writes, *(partial(write, container, item) for item in other for write in (set.discard, set.add))])
    elif isinstance(container, deque):
        pairs = zip(range(len(held)), before, held, strict=False)
        writes = [partial(deque.__setitem__, container, i, then) for i, then, now in pairs if then is not now]
        shorter = [partial(deque.pop, container)] * max(0, len(held) - len(before))
        call_all([*writes, *shorter, partial(deque.extend, container, before[len(held) :])])
    else:
        count = min(len(held), len(before))
        begin = next((i for i in range(count) if held[i] is not before[i]), count)
        if begin < max(len(held), len(before)):
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
