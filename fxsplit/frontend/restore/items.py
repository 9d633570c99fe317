"""Items of containers: copy them, compare them, and restore them entry by entry.

A container is never emptied and filled again, since another thread, or an interrupt, could find it empty. Only the
entries that differ are written. All of them are written in C code, which neither threads nor interrupts can break into.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

from fxsplit.ir.facts.capture.python_state import ABSENT, same
from fxsplit.torch_internals.scopes.undo import call_all

CONTAINERS = (list, dict, set, deque)
"""The types of containers whose content can be restored."""

KINDS = (OrderedDict, *CONTAINERS, tuple, frozenset)
"""The classes of Python's own containers. OrderedDict comes before dict, whose methods do not know its order."""

OF_PYTHON = "__builtins__"
"""The entry that Python itself adds to a dict in which it evaluates a text."""

Stays = Callable[[Any, Any], bool]
"""From an entry's value before a call and its present value: whether the entry keeps its present value."""


def find_kind(container: Any) -> Any:
    """Return the built-in class whose methods read a container. For a user's Mapping, return the Mapping's own class.

    Methods of a subclass may do more than read, or refuse to.
    """
    own = type(container)
    if own in KINDS:
        return own
    return next((kind for kind in KINDS if isinstance(container, kind)), own)


def _has_keys(kind: Any) -> bool:
    """Return whether containers of a class, a result of `find_kind`, have keys."""
    # To ask an abstract class takes longer than to copy a short dict, and each module of a model has a dozen dicts.
    return kind is dict or kind is OrderedDict or issubclass(kind, Mapping)


def count_items(container: Any) -> int:
    """Return the number of items in a container."""
    return int(find_kind(container).__len__(container))


def list_items(container: Any) -> tuple[Any, ...]:
    """Return the items of a container in their order: pairs of keys and values for a Mapping."""
    kind = find_kind(container)
    return tuple(kind.items(container) if _has_keys(kind) else kind.__iter__(container))


def copy_items(container: Any) -> tuple[Any, ...]:
    """Return the contents of a container, in its order."""
    kind, items = find_kind(container), list_items(container)
    if items and _has_keys(kind):
        there = kind.__contains__(container, OF_PYTHON)
        return tuple(item for item in items if item[0] != OF_PYTHON) if there else items
    # The order of a set depends on the addresses of its items.
    return (frozenset(items),) if isinstance(container, set) else items


def has_items(container: Any, before: tuple[Any, ...]) -> bool:
    """Return whether a container holds the same objects as when `copy_items` returned `before`, in the same order."""
    if not before:
        return count_items(container) == 0
    now = list_items(container)
    if isinstance(container, dict):
        # The pairs themselves are new tuples.
        return len(now) == len(before) and all(map(is_, chain.from_iterable(now), chain.from_iterable(before)))
    if isinstance(container, set):
        return set(map(id, now)) == set(map(id, before[0]))
    return len(now) == len(before) and all(map(is_, now, before))


def put_items_back(container: Any, before: tuple[Any, ...], stays: Stays = lambda then, now: False) -> None:
    """Restore the contents of a container from `before`, a result of `copy_items`.

    stays: decides which entries of a dict keep their present value.
    """
    if isinstance(container, dict):
        call_all(_plan_entries(container, before, stays))
        return
    held = list_items(container)
    if isinstance(container, set):
        (items,) = before
        there = set(map(id, held))
        more = frozenset(held) - items
        writes = [partial(set.update, container, items), partial(set.difference_update, container, more)]
        # An equal, but different, object may have taken the place of an item.
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
    """Return the writes that give a dict the entries of `before` again, in that order."""
    # The methods of a user's class may do more than write, and the methods of dict ignore an OrderedDict's order.
    kind: Any = OrderedDict if isinstance(held, OrderedDict) else dict
    now, wanted = dict(kind.items(held)), dict(before)
    changed = {k: v for k, v in now.items() if v is not wanted.get(k, ABSENT)}
    # During a trace a key may be a symbolic length, which cannot be compared.
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
        # Other entries remain in between, so the dict is never empty.
        writes += [partial(kind.__delitem__, held, key), partial(kind.__setitem__, held, key, wanted[key])]
    return writes


def merge_items(
    container: Any, before: tuple[Any, ...], begin: tuple[Any, ...], end: tuple[Any, ...], *, new_only: bool
) -> tuple[Any, ...]:
    """Return the items of `before` with the changes from `begin` to `end`. `new_only`: take only new entries over."""
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
