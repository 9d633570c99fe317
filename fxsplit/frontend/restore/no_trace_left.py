"""Leave no trace on the model: capture and checks run its forward(), which may change any object that it can reach.

Changes that can be undone are undone. Changes that a graph would lose, or keep from call to call, are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fxsplit.errors import TraceError
from fxsplit.frontend.restore.asides import keep_notes
from fxsplit.frontend.restore.items import CONTAINERS, copy_items, has_items, list_items, merge_items, put_items_back
from fxsplit.frontend.restore.library_objects import find_foreign, is_imported, is_namespace
from fxsplit.torch_internals.fake.snapshot import Snapshot
from fxsplit.torch_internals.nn.objects import is_a
from fxsplit.torch_internals.random.generators import keep_generators
from fxsplit.torch_internals.scopes.undo import restore_after


@contextmanager
def restore_model(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Restore attributes and hooks of every module, and random generators, after the block.

    Yields a function that restores attributes and hooks within the block. Attributes include the contents of lists,
    dicts, sets and deques, and the values of tensors that are neither parameters nor buffers.
    """
    before = _Attributes(model)
    with restore_after(before.put_back), keep_generators(), keep_notes(before):
        yield before.put_back


class _Attributes:
    """The attributes of all modules of a model, with the contents of containers and tensors among them."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        own = [m.__dict__ for m in modules]
        # Of the attributes of nn.Module itself, restore only hooks: other code restores parameters and buffers.
        values = [v for held in own for name, v in held.items() if not name.startswith("_") or "_hooks" in name]
        self._modules = frozenset(sys.modules)
        # A list stays the same list, and gets its items back.
        self._containers = [*own, *_list_collections(values)]
        self._before = self.read()
        # Neither parameters nor buffers.
        self._tensors = Snapshot(v for v in values if is_a(v, Tensor))
        self._own = {id(m.__dict__): m for m in modules}

    def read(self) -> list[tuple[Any, ...]]:
        """Return a copy of the present items of each container."""
        return [copy_items(container) for container in self._containers]

    def accept(self, begun: list[tuple[Any, ...]], *, new_only: bool) -> None:
        """Treat the changes since `read` returned `begun` as made before the block. `new_only`: only new entries."""
        held = zip(self._containers, self._before, begun, self.read(), strict=True)
        self._before = [merge_items(container, *values, new_only=new_only) for container, *values in held]

    def put_back(self) -> None:
        """Restore everything to its state before the block."""
        # Written only if values have changed: a user's backward may need an activation as it is.
        self._tensors.restore()
        changed = [pair for pair in zip(self._containers, self._before, strict=True) if not has_items(*pair)]
        if not changed:
            return
        foreign = find_foreign() if any(id(container) not in self._own for container, _ in changed) else ()
        for container, items in changed:
            if id(container) in self._own:
                # A submodule that forward() has registered is no attribute any more.
                made = self._own[id(container)]._modules
                items = tuple(item for item in items if item[0] not in made)
            if id(container) not in foreign:
                put_items_back(container, items, self._is_imported)

    def _is_imported(self, then: Any, now: Any) -> bool:
        """Return whether a new value is a module that forward() has imported, or a definition of such a module."""
        return is_imported(then, now, self._modules)


def _list_collections(values: Iterable[Any]) -> list[Any]:
    """Return the lists, dicts, sets and deques among `values` and inside of them, except dicts of Python modules."""
    found: dict[int, Any] = {}
    left = list(values)
    while left:
        value = left.pop()
        if is_a(value, CONTAINERS) and id(value) not in found and not is_namespace(value):
            found[id(value)] = value
        elif not is_a(value, tuple):  # a tuple cannot change, but it may hold a list that does
            continue
        left += (held for _, held in list_items(value)) if is_a(value, dict) else list_items(value)
    return list(found.values())


@contextmanager
def refuse_assignments(model: nn.Module) -> Iterator[None]:
    """Raise TraceError if code in the block assigns a new tensor to a parameter or buffer, and undo the assignment.

    The assignment in `self.count = self.count + 1` is not an operator of torch. A graph would lose the new value, and
    tracing would leave a proxy in the model. The error names the parameter or buffer.
    """
    with restore_assigned(model) as assigned:
        yield
    if assigned:
        path, is_new = next(iter(assigned.items()))
        name = type(model).__name__
        way = (
            f"call {name} once, then compile it, or register it in __init__()"
            if is_new
            else ("write it in place, for example self.count.add_(1) for self.count += 1")
        )
        raise TraceError(f"forward() of {name} assigns to {path!r}, which a graph cannot hold: {way}")


@contextmanager
def restore_assigned(model: nn.Module) -> Iterator[dict[str, bool]]:
    """Restore parameters and buffers that the block assigned.

    Yields a dict that is filled after the block: path -> whether the path was new.
    """
    before = [(path, held, dict(held)) for path, m in model.named_modules() for held in (m._parameters, m._buffers)]
    assigned: dict[str, bool] = {}

    def put_back() -> None:
        for path, held, kept in before:
            names = [name for name in {**held, **kept} if held.get(name) is not kept.get(name)]
            assigned.update({f"{path}.{name}".removeprefix("."): kept.get(name) is None for name in names})
            put_items_back(held, tuple(kept.items()))

    # Restored even if the block fails, since another front end will run the model.
    with restore_after(put_back):
        yield assigned
