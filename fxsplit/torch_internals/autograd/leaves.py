"""Leaves: find the tensors at which gradients end, and the hooks that watch their gradients.

A *leaf* is a tensor that no recorded operation made, such as a parameter. Each graph of a stage ends at leaves: its
parameters, and its inputs, which are detached from the stage before.
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
    """Which kinds of hooks are muted in one thread."""

    def __init__(self) -> None:
        self.kinds: Sequence[str] = ()


_muted = _Muted()


def find_leaves(root: Tensor, below: Iterable[object] = ()) -> list[Tensor]:
    """Return the leaves that want a gradient of `root`, where the search ends at the autograd nodes in `below`.

    For a loss, `below` are the nodes of the last stage's outputs: the leaves found are the loss function's own.
    """
    if root.is_leaf:
        return [root] if root.requires_grad else []
    # A leaf's node, AccumulateGrad, is the only kind that names its tensor.
    return [node.variable for node in _walk([root.grad_fn], below) if hasattr(node, "variable")]


def find_recorded_leaves(roots: Iterable[Tensor]) -> list[Tensor] | None:
    """Return the leaves that get a gradient of any of the roots, by what autograd has recorded; nothing is computed.

    None where the record does not tell: a backward written in Python may give no gradient.
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
    """Yield each autograd node that the given ones lead to, once; the walk ends at the nodes in `below`."""
    # `next_functions` has None for an argument that wants no gradient.
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
    """Return whether the backward that runs now, in this thread, comes to one of the leaves `ends`.

    Where there are none, it is asked for each node of the graph behind `roots`, but for those of leaves.
    """
    if ends:
        return any(torch._C._will_engine_execute_node(get_gradient_edge(end).node) for end in ends)
    inner = (node for node in _walk(root.grad_fn for root in roots) if not hasattr(node, "variable"))
    return any(map(torch._C._will_engine_execute_node, inner))


class _MutableHook:
    """A gradient hook of the user's that does nothing where hooks are muted. It is equal to the user's own function."""

    def __init__(self, hook: Callable[[Tensor], Any], key: str) -> None:
        update_wrapper(self, hook)
        self._hook = hook
        self._key = key

    def __call__(self, gradient: Tensor | None) -> Any:
        """Return the gradient that the hook makes of a gradient, or None where that stays as it is."""
        # Where a part of a model gets no gradient, autograd has none to hand on, and torch calls no hook for a leaf.
        return None if gradient is None or _is_muted(self._key) else self._hook(gradient)

    def __eq__(self, other: object) -> bool:
        return self._hook == (other._hook if isinstance(other, _MutableHook) else other)

    def __hash__(self) -> int:
        return hash(self._hook)


class OwnHook(partial[Any]):
    """A gradient hook of fxsplit's own, which sees the gradient of each microbatch and is not muted."""


@contextmanager
def hide_gradients(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Let the leaves have no `.grad` inside the block, and their own again after it.

    A backward in the block may add to `.grad` by itself: an autograd.Function that runs another backward does.
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
    """Let the leaves' gradient hooks do nothing in backwards of this thread inside the block, which it runs itself.

    Gradients inside the block are those of one microbatch, and a hook expects that of a whole batch. The hooks stay
    where they are, so that no interrupt can lose them. `kinds` are BEFORE, for hooks that may change a gradient, and
    AFTER, for those that are called when it has been added to `.grad`.
    """
    for leaf in leaves:
        make_mutable(leaf)
    threaded = torch.autograd.is_multithreading_enabled()
    with (
        restore_after(partial(_set_muted, _muted.kinds)),
        restore_after(partial(torch.autograd.set_multithreading_enabled, threaded)),
    ):
        # Autograd would run the part of a backward that is on a GPU in a thread of its own, where nothing is muted.
        torch.autograd.set_multithreading_enabled(False)
        _set_muted(kinds)
        yield


@contextmanager
def unmute() -> Iterator[None]:
    """Let hooks run inside the block, which is inside one of `mute`."""
    with restore_after(partial(_set_muted, _muted.kinds)):
        _set_muted(())
        yield


def put_hook_behind(leaf: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call a hook when a gradient has been added to the `.grad` of a new leaf, which has no hooks yet."""
    # What register_post_accumulate_grad_hook() does, without a handle to remove the hook by, which takes four times as
    # long. Handles count from 0.
    leaf._post_accumulate_grad_hooks = OrderedDict({-1: hook})


def make_mutable(leaf: Tensor) -> None:
    """Let the hooks that a leaf has now ask whether they are muted."""
    # The usual case, and asked of every leaf in every step.
    found: list[dict[int, Any] | None] = [leaf._backward_hooks, leaf._post_accumulate_grad_hooks]
    if found == [None, None]:
        return
    for kind, some in zip(BOTH, found, strict=True):
        hooks = some or {}
        # Autograd reads this very dictionary; the handle of a hook knows the hook by its key.
        for key, hook in list(hooks.items()):
            if type(hook) not in (_MutableHook, OwnHook):
                hooks[key] = _MutableHook(hook, kind)


def _is_muted(kind: str) -> bool:
    """Return whether hooks of a kind are muted for this thread."""
    return kind in _muted.kinds


def _set_muted(kinds: Sequence[str]) -> None:
    """Mute hooks of these kinds and no others, for this thread."""
    _muted.kinds = kinds


def list_gradient_hooks(leaf: Tensor) -> list[dict[int, Any]]:
    """Return the dictionaries of a leaf's hooks: those before and after its gradient is added to `.grad`."""
    found = (leaf._backward_hooks, leaf._post_accumulate_grad_hooks)
    return [hooks for hooks in found if hooks is not None]


def has_hooks_behind(leaf: Tensor) -> bool:
    """Return whether a leaf has hooks that are called when its gradient has been added to `.grad`."""
    return bool(leaf._post_accumulate_grad_hooks)


@contextmanager
def watch_hooks(seen: Callable[[Tensor], object]) -> Iterator[None]:
    """Call `seen` with each tensor that the block, in this thread, puts a gradient hook on."""

    def wrap(register: Method) -> Method:
        def watched(tensor: Tensor, hook: Callable[..., Any]) -> Any:
            # Under a mode, as a default device is one, the method hands itself to the mode, which calls it once more.
            if not has_torch_function_unary(tensor):
                seen(tensor)
            return register(tensor, hook)

        return watched

    with patch_method(Tensor, "register_hook", wrap):
        yield
