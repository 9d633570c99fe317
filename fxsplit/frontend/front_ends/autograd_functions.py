"""Keep the calls of autograd.Functions in a graph. A front end would record their forward, and lose their backward.

Symbolic tracing records the call itself as a node. torch.export looks into the call. So two operators, enter and leave,
mark each input and output tensor, and later the call is put back between the marks (`front_ends/export/inline.py`):

    enter = fxsplit::enter(x, 0)            the first input tensor of call 0
    mul = aten.mul(enter, 0.5)              the operators of the function's forward
    leave = fxsplit::leave(mul, 0, 0)       output 0 of call 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointFunction

from fxsplit.errors import TraceError
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fx.vmap import is_transformed
from fxsplit.torch_internals.random.seeded_calls import lend_draws
from fxsplit.torch_internals.scopes.patch import Method, find_owner_of_apply, patch_method
from fxsplit.torch_internals.scopes.undo import CallerLock

TORCHS = ("torch._library.", "torch._functorch.")
"""Modules with torch's own autograd.Functions, for operators that a graph may hold."""

Record = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""From (function, args, kwargs): makes a node that calls the function."""
Call = Callable[..., Any]

one_trace = CallerLock(lend_draws)
"""Front ends patch torch for as long as they trace, so they take turns."""

torch.library.define("fxsplit::enter", "(Tensor x, int call) -> Tensor")
torch.library.define("fxsplit::leave", "(Tensor x, int call, int output) -> Tensor")
# Clones, since the schemas promise new memory: an operator must not return its input.
torch.library.impl("fxsplit::enter", "CompositeExplicitAutograd", lambda x, call: x.clone())
torch.library.impl("fxsplit::leave", "CompositeExplicitAutograd", lambda x, call, output: x.clone())
enter, leave = torch.ops.fxsplit.enter.default, torch.ops.fxsplit.leave.default


@contextmanager
def record_functions(record: Record) -> Iterator[None]:
    """Inside the block, record this thread's calls of autograd.Functions on proxies as nodes."""

    def replace(cls: Any, own: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # torch itself, or another library, may call a function on plain tensors while a model is traced.
        traced = any(isinstance(a, fx.Proxy) for a in args)
        return record(_make_call(cls), args, kwargs) if traced else own(cls, *args, **kwargs)

    with _replace_calls(replace):
        yield


@contextmanager
def mark_functions() -> Iterator[list[Call]]:
    """Inside the block, surround this thread's calls of autograd.Functions with marks, operators that a graph records.

    A graph's writer can then find the operators of each call and put the call in their place. Yields a list that gets,
    for each call, a function of only the call's input tensors.
    """
    calls: list[Call] = []

    def replace(cls: Any, own: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # vmap runs the function's own rule, on tensors with one more dimension.
        if is_transformed():
            return own(cls, *args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        number = len(calls)
        calls.append(_make_call_of_tensors(cls, leaves, structure))
        # Every tensor is marked, even without a gradient, since the call is made with all of them.
        entered = [enter(leaf, number) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(entered, structure)
        outputs, containers = pytree.tree_flatten(own(cls, *args, **kwargs))
        left = [leave(o, number, i) if isinstance(o, Tensor) else o for i, o in enumerate(outputs)]
        return pytree.tree_unflatten(left, containers)

    with _replace_calls(replace):
        yield calls


@contextmanager
def _replace_calls(replace: Callable[[Any, Call, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Inside the block, call `replace` in place of this thread's calls of the user's autograd.Functions."""

    def call(apply: Method, cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith(TORCHS):
            return apply(cls, *args, **kwargs)
        # Its backward runs a backward of its own, through a part of forward() that several stages may share.
        if cls is CheckpointFunction:
            raise TraceError(
                "forward() calls checkpoint(use_reentrant=True), whose backward cannot be run in parts: give it "
                "use_reentrant=False, or leave it out and compile(recompute='always')"
            )
        return replace(cls, apply, args, kwargs)

    with patch_method(find_owner_of_apply(), "apply", lambda apply: partial(call, apply)):
        yield


@cache  # two graphs are compared by their nodes' targets, so the function of one class must be one object
def _make_call(cls: Any) -> Call:
    """Return the function that calls one autograd.Function."""
    return _name_after(cls, lambda *args, **kwargs: cls.apply(*args, **kwargs))


def _make_call_of_tensors(cls: Any, leaves: list[Any], structure: pytree.TreeSpec) -> Call:
    """Return a function of only the tensors of a call of an autograd.Function; all other arguments are constants.

    The function returns its outputs as a flat tuple, since a mark names an output by its number.
    """
    # The tensors of this call are not kept: they belong to an exported program that is gone by the next call.
    held = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def call(*tensors: Tensor) -> Any:
        filled = list(held)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, structure)
        return tuple(pytree.tree_leaves(cls.apply(*args, **kwargs)))

    call.held = held  # type: ignore[attr-defined]  # tells calls with other arguments apart
    return _name_after(cls, call)


def _name_after(cls: Any, call: Call) -> Call:
    """Give a function the name of a class, for the code of graphs, and return it."""
    call.__name__ = call.__qualname__ = cls.__name__
    call.__module__ = cls.__module__
    return call
