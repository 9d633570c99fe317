"""Leave no trace on the model: capturing and checking run its forward(), which may change anything that it reaches.

What can be put back is put back. What a graph would lose, or keep from call to call, is refused.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fxsplit.errors import TraceError
from fxsplit.torch_internals.generators import keep_generators
from fxsplit.torch_internals.undo import undo_after


@contextmanager
def restore_model(model: nn.Module) -> Iterator[None]:
    """Restore attributes and hooks of every module, and random generators, after the block.

    Attributes include what is in lists, dicts, sets and deques, and the values of tensors that are neither parameters
    nor buffers.
    """
    # A copy of each __dict__ keeps the objects; what is inside of them is copied below, and put back into them.
    before = [(m, dict(m.__dict__)) for m in model.modules()]
    # Of what torch itself keeps in a module only the hooks: parameters and buffers have a restorer of their own.
    values = [v for _, held in before for name, v in held.items() if not name.startswith("_") or "_hooks" in name]
    contents = [(v, copy.copy(v)) for v in _list_collections(values)]
    tensors = [(v, v.detach().clone()) for v in values if isinstance(v, Tensor)]  # neither parameters nor buffers

    def put_back() -> None:
        for module, attributes in before:
            # Never empty: an interrupt in between must leave a module that works.
            module.__dict__.update(attributes)
            for name in module.__dict__.keys() - attributes.keys():
                del module.__dict__[name]
        for tensor, value in tensors:
            tensor.detach().copy_(value)
        for collection, kept in contents:
            collection.clear()
            collection.extend(kept) if isinstance(collection, (list, deque)) else collection.update(kept)

    with undo_after(put_back), keep_generators():
        yield


def _list_collections(values: Iterable[Any]) -> list[Any]:
    """Return the lists, dicts, sets and deques among values, and those inside of them."""
    found: dict[int, Any] = {}
    left = list(values)
    while left:
        value = left.pop()
        if isinstance(value, (list, dict, set, deque)) and id(value) not in found:
            found[id(value)] = value
        elif not isinstance(value, tuple):  # a tuple cannot change, but it may hold a list that does
            continue
        left += value.values() if isinstance(value, dict) else value
    return list(found.values())


@contextmanager
def refuse_draws(model: nn.Module, states: Callable[[], Any]) -> Iterator[None]:
    """Raise TraceError where the block draws random numbers, which would be constants of the graph.

    `states` reads the states of the generators that count; a draw changes one of them.
    """
    before = states()
    yield
    if states() != before:
        raise TraceError(
            f"forward() of {type(model).__name__} draws random numbers that do not depend on its inputs, which a graph "
            "would keep from call to call: draw like an input, torch.randn_like(x), or hand them to the model"
        )


@contextmanager
def refuse_assignments(model: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers that the block assigned, and raise TraceError naming one.

    `self.count = self.count + 1` is no operator, so a graph would lose the new value, and tracing would leave a proxy
    in the model.
    """
    with restore_assigned(model) as assigned:
        yield
    if assigned:
        raise TraceError(
            f"forward() of {type(model).__name__} assigns to {next(iter(assigned))!r}, which a graph cannot hold: "
            "write it in place, for example self.count.add_(1) for self.count += 1"
        )


@contextmanager
def restore_assigned(model: nn.Module) -> Iterator[dict[str, None]]:
    """Restore parameters and buffers that the block assigned. Yields a dict that has their paths after the block."""
    before = [(path, held, dict(held)) for path, m in model.named_modules() for held in (m._parameters, m._buffers)]
    assigned: dict[str, None] = {}

    def put_back() -> None:
        for path, held, kept in before:
            names = [name for name in {**held, **kept} if held.get(name) is not kept.get(name)]
            assigned.update(dict.fromkeys(f"{path}.{name}".removeprefix(".") for name in names))
            held.clear()
            held.update(kept)

    # Put back even when the block fails: another front end will run the model.
    with undo_after(put_back):
        yield assigned
