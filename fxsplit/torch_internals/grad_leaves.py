"""Leaves: the tensors that gradients end at, what watches them, and which of them a result depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fxsplit.torch_internals.patch import Method, patch_method


def find_leaves(root: Tensor, below: Iterable[object] = ()) -> list[Tensor]:
    """Return the leaves that want a gradient of `root`, on the way down to the autograd nodes in `below`."""
    if root.is_leaf:
        return [root] if root.requires_grad else []
    found: list[Tensor] = []
    seen = {None, *below}
    stack = [root.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        stack += [above for above, _ in node.next_functions]
    return found


@contextmanager
def mute(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Take the leaves' gradient hooks away for the block, in which gradients are not yet those of a whole batch."""
    hooks = [(h, dict(h)) for leaf in leaves for h in list_gradient_hooks(leaf)]
    for registered, _ in hooks:
        registered.clear()
    try:
        yield
    finally:
        for registered, kept in hooks:
            registered.update(kept)


def list_gradient_hooks(leaf: Tensor) -> list[dict[int, Any]]:
    """Return the dictionaries of what watches a leaf's gradient; autograd reads the same objects."""
    found = (leaf._backward_hooks, leaf._post_accumulate_grad_hooks)
    return [hooks for hooks in found if hooks is not None]


@contextmanager
def watch_hooks(seen: Callable[[Tensor], object]) -> Iterator[None]:
    """Call `seen` with each tensor that the block, in this thread, puts a hook on."""

    def seeing(register: Method) -> Method:
        def registered(tensor: Tensor, hook: Callable[..., Any]) -> Any:
            seen(tensor)
            return register(tensor, hook)

        return registered

    with patch_method(Tensor, "register_hook", seeing):
        yield
