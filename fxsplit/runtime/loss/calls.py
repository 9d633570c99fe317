"""Record the torch calls of a loss function, to notice when the way in which it counts the target's entries changes.

A loss function may read a threshold, a flag or class weights that change between steps. Its count of entries changes
with them, and the count that was found in the first steps no longer holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.thread_modes import OnlyListens

SIZED = {
    *("view", "reshape", "expand", "broadcast_to", "repeat", "tile", "unflatten", "narrow", "split", "chunk"),
    *("arange", "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "__getitem__"),
}
"""Functions of torch whose number arguments are mostly sizes, which change with a batch's rows and lengths."""


class Held:
    """A tensor in a record of calls. It equals only a record of the same tensor object.

    The tensor is kept alive, so that no later tensor gets its id.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and other.tensor is self.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


class Heard(NamedTuple):
    """The calls that a loss function made in one step. Equal records mean that the loss still counts entries as before.

    calls: the names of the called functions, with their numbers and foreign tensors.
    sizes: the numbers that are sizes.
    """

    calls: tuple[Any, ...]
    sizes: tuple[Any, ...]


class Calls(OnlyListens):
    """Records the calls in which a loss function may count entries.

    These are calls that depend on the target, and calls that do not depend on the model's outputs. A *foreign* tensor
    is neither an output nor the target, nor made from them, nor trained: class weights, for example.
    """

    def __init__(self, outputs: Any, target: Any) -> None:
        super().__init__()
        self._made = {id(leaf) for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)}
        self._target = {id(leaf) for leaf in pytree.tree_leaves(target) if isinstance(leaf, Tensor)}
        self._own = set[int]()  # tensors that calls make from numbers and foreign tensors
        self._kept: list[Any] = []  # keeps tensors alive: no later tensor may get the id of a recorded tensor
        self._calls: list[Any] = []
        self._sizes: list[Any] = []

    @property
    def heard(self) -> Heard:
        """The recorded calls and their arguments."""
        return Heard(tuple(self._calls), tuple(self._sizes))

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, and record it."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given = [*_list_leaves(args), *_list_leaves(kwargs.values())]
        tensors = {id(leaf): leaf for leaf in given if isinstance(leaf, Tensor)}
        made, followed = not self._made.isdisjoint(tensors), not self._target.isdisjoint(tensors)
        if followed or not made:
            name = getattr(function, "__name__", "")
            numbers = tuple(leaf for leaf in given if isinstance(leaf, (int, float, str)))
            foreign = tuple(Held(tensor) for key, tensor in tensors.items() if self._is_foreign(key, tensor))
            self._kept += tensors.values()
            # An index into a foreign table is not a size.
            sized = name in SIZED and (followed or name != "__getitem__")
            self._calls.append((name, () if sized else numbers, foreign))
            self._sizes += numbers if sized else ()
        known = self._made if made else self._target if followed else self._own
        for part in _list_leaves((result,)):
            if isinstance(part, Tensor):
                known.add(id(part))
                self._kept.append(part)
        return result

    def _is_foreign(self, key: int, tensor: Tensor) -> bool:
        """Return whether a tensor is neither an output nor the target, nor made from them, nor trained."""
        return not (key in self._made or key in self._target or key in self._own or tensor.requires_grad)


def _list_leaves(values: Iterable[Any]) -> list[Any]:
    """Return the values, with the items of each list or tuple in place of the list or tuple."""
    found: list[Any] = []
    for value in values:
        found += value if isinstance(value, (list, tuple)) else (value,)
    return found
