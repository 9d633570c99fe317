"""Find the leaves of autograd graphs, and mute the hooks on their gradients.

A *leaf* is a tensor that no recorded operation made, such as a parameter. Each graph of a stage ends at leaves: the
stage's parameters, and its inputs, which are detached from the previous stage.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.overrides import has_torch_function_unary

from fxsplit.torch_internals.scopes.patch import Method, patch_method
from fxsplit.torch_internals.scopes.undo import restore_after

BEFORE, AFTER = "before .grad", "behind .grad"
"""The kinds of a leaf's gradient hooks, by when they are called."""
BOTH = BEFORE, AFTER


class _Muted(threading.local):
    """The kinds of hooks that are muted in one thread."""

    def __init__(self) -> None:
        self.kinds: Sequence[str] = ()


_muted = _Muted()


def find_leaves(root: Tensor, below: Iterable[object] = ()) -> list[Tensor]:
    """Return the leaves that get a gradient from `root`. The search stops at the autograd nodes in `below`.

    If `root` is a loss and `below` has the nodes of the last stage's outputs, the leaves belong to the loss function.
    """
    if root.is_leaf:
        return [root] if root.requires_grad else []
    # AccumulateGrad, a leaf's node, is the only node type with a `variable`.
    return [node.variable for node in _walk([root.grad_fn], below) if hasattr(node, "variable")]


def find_recorded_leaves(roots: Iterable[Tensor]) -> list[Tensor] | None:
    """Return the leaves that get a gradient from any root, according to autograd's graph. Computes no gradient.

    Returns None if the graph does not show it: a backward written in Python may return no gradient.
    """
    found, nodes = [], []
    for root in roots:
        if root.grad_fn is None:
            found.append(root)
        else:
            nodes.append(root.grad_fn)
    for node in _walk(nodes):
        if isinstance(node, BackwardCFunction):
            return None
        if hasattr(node, "variable"):
            found.append(node.variable)
    return found


def _walk(nodes: Iterable[Any], below: Iterable[object] = ()) -> Iterator[Any]:
    """Yield each autograd node reachable from `nodes` once. The walk stops at the nodes in `below`."""
    # `next_functions` has None for an argument without gradient.
    seen = {None, *below}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        stack += [above for above, _ in node.next_functions]


def comes_through(ends: Sequence[Tensor], roots: Iterable[Tensor]) -> bool:
    """Return whether the backward now running in this thread reaches one of the leaves `ends`.

    If `ends` is empty, return whether that backward runs a node of the graph of `roots` that is not a leaf's node.
    """
    if ends:
        return any(torch._C._will_engine_execute_node(get_gradient_edge(end).node) for end in ends)
    inner = (node for node in _walk(root.grad_fn for root in roots) if not hasattr(node, "variable"))
    return any(map(torch._C._will_engine_execute_node, inner))


class _MutableHook:
    """A user's gradient hook that does nothing while hooks are muted. It compares equal to the user's function.

    key: the kind of the hook, BEFORE or AFTER.
    """

    def __init__(self, hook: Callable[[Tensor], Any], key: str) -> None:
        update_wrapper(self, hook)
        self._hook = hook
        self._key = key

    def __call__(self, gradient: Tensor | None) -> Any:
        """Call the hook, and return its result, unless it is muted."""
        # A part of the model that gets no gradient has None here; torch calls no hook of a leaf for it.
        return None if gradient is None or _is_muted(self._key) else self._hook(gradient)

    def __eq__(self, other: object) -> bool:
        return self._hook == (other._hook if isinstance(other, _MutableHook) else other)

    def __hash__(self) -> int:
        return hash(self._hook)


class OwnHook(partial[Any]):
    """A gradient hook that fxsplit itself has registered.

    It gets the gradient of each microbatch, and is never muted.
    """


@contextmanager
def hide_gradients(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Set the `.grad` of the leaves to None inside the block, and restore it afterwards.

    A backward inside the block may itself add to `.grad`: for example, if an autograd.Function runs another backward.
    """
    before = [(leaf, leaf.grad) for leaf in leaves]

    def put_back() -> None:
        for leaf, gradient in before:
            if leaf.grad is not gradient:
                leaf.grad = gradient

    with restore_after(put_back):
        for leaf, gradient in before:
            if gradient is not None:
                leaf.grad = None
        yield


@contextmanager
def mute(leaves: Iterable[Tensor], kinds: Sequence[str] = BOTH) -> Iterator[None]:
    """Mute the leaves' gradient hooks inside the block, in backwards that run in this thread.

    Gradients inside the block belong to one microbatch, but a hook expects the gradient of a whole batch. The hooks
    stay registered, so no interrupt can lose them.
    kinds: BEFORE for hooks that may change a gradient, AFTER for hooks that are called after it was added to `.grad`.
    """
    make_mutable(leaves)
    threaded = torch.autograd.is_multithreading_enabled()
    with (
        restore_after(partial(_set_muted, _muted.kinds)),
        restore_after(partial(torch.autograd.set_multithreading_enabled, threaded)),
    ):
        # Otherwise autograd runs the GPU part of a backward in a thread of its own, in which no hook is muted.
        torch.autograd.set_multithreading_enabled(False)
        _set_muted(kinds)
        yield


@contextmanager
def unmute() -> Iterator[None]:
    """Let hooks run inside the block, although the block is inside a block of `mute`."""
    with restore_after(partial(_set_muted, _muted.kinds)):
        _set_muted(())
        yield


def put_hook_behind(leaf: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Register a hook on a new leaf without hooks. The hook runs after a gradient was added to the leaf's `.grad`."""
    # Like register_post_accumulate_grad_hook(), but four times as fast, since no handle for removal is made. Ids of
    # handles count from 0, so -1 is free.
    leaf._post_accumulate_grad_hooks = OrderedDict({-1: hook})


def make_mutable(leaves: Iterable[Tensor]) -> None:
    """Wrap the current hooks of leaves so that they can be muted."""
    # Every step looks at every leaf, and most have no hooks.
    kinds = [(leaf._backward_hooks, leaf._post_accumulate_grad_hooks) for leaf in leaves]
    for kind, hooks in [(kind, some) for found in kinds for kind, some in zip(BOTH, found, strict=True) if some]:
        # Change the dictionary in place: autograd reads it, and a hook's handle finds the hook by its key.
        for key, hook in list(hooks.items()):
            if type(hook) not in (_MutableHook, OwnHook):
                hooks[key] = _MutableHook(hook, kind)


def _is_muted(kind: str) -> bool:
    """Return whether a kind of hook is muted in this thread."""
    return kind in _muted.kinds


def _set_muted(kinds: Sequence[str]) -> None:
    """Mute exactly these kinds of hooks in this thread."""
    _muted.kinds = kinds


def list_gradient_hooks(leaf: Tensor) -> list[dict[int, Any]]:
    """Return two dictionaries: the hooks that run before a leaf's gradient is added to `.grad`, and after it."""
    found = (leaf._backward_hooks, leaf._post_accumulate_grad_hooks)
    return [hooks for hooks in found if hooks is not None]


def find_hooked(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that have gradient hooks of either kind."""
    return [leaf for leaf in leaves if leaf._backward_hooks or leaf._post_accumulate_grad_hooks]


def has_hooks_behind(leaf: Tensor) -> bool:
    """Return whether a leaf has hooks that are called after its gradient was added to `.grad`."""
    return bool(leaf._post_accumulate_grad_hooks)


@contextmanager
def watch_hooks(seen: Callable[[Tensor], object]) -> Iterator[None]:
    """Call `seen` with each tensor on which this thread registers a gradient hook in the block."""

    def wrap(register: Method) -> Method:
        def watched(tensor: Tensor, hook: Callable[..., Any]) -> Any:
            # Under a function mode, such as a default device, the method calls itself again through the mode.
            if not has_torch_function_unary(tensor):
                seen(tensor)
            return register(tensor, hook)

        return watched

    with patch_method(Tensor, "register_hook", wrap):
        yield
