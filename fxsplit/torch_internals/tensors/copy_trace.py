"""Trace how a function joins, cuts and transposes tensors, so that its result can later be filled in part by part.

A function that stacks eight tensors needs memory for all of them and for the result. Tracing it on the meta device,
where tensors have no values, shows which part of the result each source becomes. The sources can then be loaded one by
one, each straight into the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fxsplit.torch_internals.thread_modes import enter_dispatch_mode

View = Callable[[Tensor], Tensor]
aten = torch.ops.aten

COPIES = {aten.clone.default, aten.detach.default, aten.alias.default}
"""Operators that keep the values and the shape of their input."""
RESHAPES = {
    aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip
"""Operators that keep the values of their input in the same order."""
TURNS = {aten.transpose.int, aten.t.default, aten.permute.default}
CUTS = {
    aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.select.int, aten.slice.Tensor,
}  # fmt: skip
"""Operators that take parts of one tensor."""


@dataclass(frozen=True)
class CopiedPart:
    """A part of a result that is a copy of a part of one source: `place(result).copy_(take(source))`.

    source: the name of the source. take: selects the part of the source. place: returns the view of the result to fill.
    """

    source: str
    take: View
    place: View


Parts = tuple[CopiedPart, ...]


def trace_copies(
    make: Callable[[Callable[[str], Tensor]], dict[str, Tensor]], sources: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Parts] | None]:
    """Find out which parts of which sources make up each result of `make`, by running `make` on meta tensors.

    make: gets a function that returns a source by name, and returns its results by name.
    sources: meta tensors of the right shapes, by name.
    Returns the results, and for each result the parts that it is copied from. The parts cover each result exactly once.
    In place of the parts, returns None if `make` does anything but copy values to other positions.
    """
    mode = _Copies(sources)
    with enter_dispatch_mode(mode):
        made = make(sources.__getitem__)
    found = {name: mode.find(value) for name, value in made.items()}
    parts = {name: known for name, known in found.items() if known}
    return made, parts if len(parts) == len(made) and not mode.has_writes else None


def fits(parts: Parts, sources: Mapping[str, Tensor], like: Tensor) -> bool:
    """Return whether these parts can fill a tensor with the shape and strides of `like`. Values are not needed."""
    target = torch.empty_strided(like.shape, like.stride(), device="meta")
    try:
        pairs = [(part.take(sources[part.source]), part.place(target)) for part in parts]
    except RuntimeError:  # the strides of this tensor do not allow the view
        return False
    return all(a.shape == b.shape for a, b in pairs) and sum(b.numel() for _, b in pairs) == target.numel()


def _keep(tensor: Tensor) -> Tensor:
    return tensor


class _Copies(TorchDispatchMode):
    """Records from which parts of which sources the results of operators are made."""

    def __init__(self, sources: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By id. Keep the tensor too, so that no other tensor gets its id.
        self._parts: dict[int, tuple[Tensor, Parts]] = {}
        self.has_writes = False
        for name, tensor in sources.items():
            self._note(tensor, (CopiedPart(name, _keep, _keep),))

    def find(self, value: Any) -> Parts:
        """Return the parts that a tensor is made of, or () if they are not known."""
        known = self._parts.get(id(value))
        return known[1] if known else ()

    def _note(self, tensor: Tensor, parts: Parts) -> None:
        if parts:
            self._parts[id(tensor)] = (tensor, parts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and record the parts of its result."""
        kwargs = kwargs or {}
        known = any(self.find(value) for value in tree_iter((args, kwargs)))
        result = func(*args, **kwargs)
        if not known:
            return result
        if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
            self.has_writes = True  # a write also changes tensors that share the memory
        elif func in (aten.cat.default, aten.stack.default):
            self._note(result, self._join(func, *args, **kwargs))
        elif func in COPIES | RESHAPES | TURNS | CUTS:
            many = isinstance(result, (list, tuple))
            for i, tensor in enumerate(result if many else [result]):
                number = i if many else None
                self._note(tensor, _follow(self.find(args[0]), func, args, kwargs, number, tensor.shape))
        return result

    def _join(self, func: Any, tensors: list[Tensor], dim: int = 0) -> Parts:
        """Return the parts of a tensor made by torch.cat along a dimension, or by torch.stack along a new one."""
        joined: list[CopiedPart] = []
        at = 0
        for i, tensor in enumerate(tensors):
            parts = self.find(tensor)
            if not parts:
                return ()
            if func is aten.stack.default:
                own = _select(dim, i)
            elif tensor.shape == (0,):  # torch.cat skips empty 1-D tensors
                continue
            else:
                own = _narrow(dim, at, tensor.shape[dim])
                at += tensor.shape[dim]
            joined += [CopiedPart(p.source, p.take, _chain(own, p.place)) for p in parts]
        return tuple(joined)


def _follow(parts: Parts, func: Any, args: Any, kwargs: Any, number: int | None, shape: torch.Size) -> Parts:
    """Return the parts of an operator's result, given the parts of its input; () if they are not known.

    number: the index of the result, if there are several. shape: the shape of the result.
    """
    before = args[0].shape
    if len(parts) == 1 and parts[0].place is _keep:

        def take(tensor: Tensor) -> Tensor:
            if func in COPIES:
                return tensor
            if func in RESHAPES:
                return tensor.reshape(shape)
            result = func(tensor, *args[1:], **kwargs)
            return result if number is None else result[number]  # type: ignore[no-any-return]

        return (CopiedPart(parts[0].source, _chain(parts[0].take, take), _keep),)
    if func in COPIES:
        return parts
    # A slice of a concatenated tensor may span several sources.
    if func in CUTS:
        return ()

    def undo(tensor: Tensor) -> Tensor:
        if func in RESHAPES:
            return tensor.view(before)
        if func is aten.permute.default:
            order = [d % len(before) for d in args[1]]
            return tensor.permute([order.index(d) for d in range(len(order))])
        return func(tensor, *args[1:], **kwargs)  # type: ignore[no-any-return]  # turned twice is as before

    return tuple(CopiedPart(p.source, p.take, _chain(undo, p.place)) for p in parts)


def _chain(first: View, second: View) -> View:
    """Return the function that applies `first` to a tensor, and then `second` to the result."""
    if first is _keep or second is _keep:
        return second if first is _keep else first
    return lambda tensor: second(first(tensor))


def _select(dim: int, index: int) -> View:
    return lambda tensor: tensor.select(dim, index)


def _narrow(dim: int, start: int, length: int) -> View:
    return lambda tensor: tensor.narrow(dim, start, length)
