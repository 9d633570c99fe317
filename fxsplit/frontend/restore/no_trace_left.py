"""Leave no trace on the model: capturing and checking run its forward(), which may change anything that it reaches.

What can be put back is put back. What a graph would lose, or keep from call to call, is refused.
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
from fxsplit.frontend.restore.owners import find_foreign, is_imported, is_namespace
from fxsplit.torch_internals.fake.fake_weights import Snapshot
from fxsplit.torch_internals.nn.objects import is_a
from fxsplit.torch_internals.random.generators import keep_generators
from fxsplit.torch_internals.scopes.undo import restore_after


@contextmanager
def restore_model(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Restore attributes and hooks of every module, and random generators, after the block.

    Yields a function that restores attributes and hooks within the block. Attributes include what is in lists, dicts,
    sets and deques, and the values of tensors that are neither parameters nor buffers.
    """
    before = _Attributes(model)
    with restore_after(before.put_back), keep_generators(), keep_notes(before):
        yield before.put_back


class _Attributes:
    """The attributes of all modules of a model, with the content of containers and tensors among them."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        own = [m.__dict__ for m in modules]
        # Of what torch itself keeps in a module only the hooks: parameters and buffers have a restorer of their own.
        values = [v for held in own for name, v in held.items() if not name.startswith("_") or "_hooks" in name]
        self._modules = frozenset(sys.modules)
        # A list stays the same list, and gets its items back.
        self._containers = [*own, *_list_collections(values)]
        self._before = self.read()
        # Neither parameters nor buffers.
        self._tensors = Snapshot(v for v in values if is_a(v, Tensor))
        self._own = {id(m.__dict__): m for m in modules}

    def read(self) -> list[tuple[Any, ...]]:
        """Return the items of the containers now."""
        return [copy_items(container) for container in self._containers]

    def accept(self, begun: list[tuple[Any, ...]], *, new_only: bool) -> None:
        """Count the changes since `read` returned `begun`, or only new entries, as made before the block."""
        held = zip(self._containers, self._before, begun, self.read(), strict=True)
        self._before = [merge_items(container, *values, new_only=new_only) for container, *values in held]

    def put_back(self) -> None:
        """Let everything hold again what it held before the block."""
        # Written only where values have changed: a backward of the user's may need an activation as it is.
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
        """Return whether a place has a module now that forward() has imported, or a definition of such a module."""
        return is_imported(then, now, self._modules)


def _list_collections(values: Iterable[Any]) -> list[Any]:
    """Return the lists, dicts, sets and deques among values, and those inside of them, but no module's dict."""
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
    """Restore parameters and buffers that the block assigned, and raise TraceError naming one.

    `self.count = self.count + 1` is no operator, so a graph would lose the new value, and tracing would leave a proxy
    in the model.
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

    Yields a dict that has their paths after the block, and whether there was none under the path before.
    """
    before = [(path, held, dict(held)) for path, m in model.named_modules() for held in (m._parameters, m._buffers)]
    assigned: dict[str, bool] = {}

    def put_back() -> None:
        for path, held, kept in before:
            names = [name for name in {**held, **kept} if held.get(name) is not kept.get(name)]
            assigned.update({f"{path}.{name}".removeprefix("."): kept.get(name) is None for name in names})
            put_items_back(held, tuple(kept.items()))

    # Put back even when the block fails: another front end will run the model.
    with restore_after(put_back):
        yield assigned
