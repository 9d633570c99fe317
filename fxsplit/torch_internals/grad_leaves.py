"""Leaves: find the tensors at which gradients end, and the hooks that watch their gradients.

A *leaf* is a tensor that no recorded operation made, such as a parameter. Each graph of a stage ends at leaves: its
parameters, and its inputs, which are detached from the stage before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import has_torch_function_unary

from fxsplit.torch_internals.patch import Method, patch_method


def find_leaves(root: Tensor, below: Iterable[object] = ()) -> list[Tensor]:
    """Return the leaves that want a gradient of `root`, where the search ends at the autograd nodes in `below`.

    For a loss, `below` are the nodes of the last stage's outputs: the leaves found are the loss function's own.
    """
    if root.is_leaf:
        return [root] if root.requires_grad else []
    found: list[Tensor] = []
    # `next_functions` has None for an argument that wants no gradient.
    seen = {None, *below}
    stack = [root.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # A leaf's node, AccumulateGrad, is the only kind that names its tensor.
        if hasattr(node, "variable"):
            found.append(node.variable)
        stack += [above for above, _ in node.next_functions]
    return found


@contextmanager
def mute(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Take the leaves' gradient hooks away for the block.

    Gradients inside the block are those of one microbatch, and a hook expects that of a whole batch.
    """
    hooks = [(h, dict(h)) for leaf in leaves for h in list_gradient_hooks(leaf)]
    # Autograd reads the very dictionaries, so they are emptied and filled again, and never replaced.
    for registered, _ in hooks:
        registered.clear()
    try:
        yield
    finally:
        for registered, kept in hooks:
            registered.update(kept)


def list_gradient_hooks(leaf: Tensor) -> list[dict[int, Any]]:
    """Return the dictionaries of a leaf's hooks: those before and after its gradient is added to `.grad`."""
    found = (leaf._backward_hooks, leaf._post_accumulate_grad_hooks)
    return [hooks for hooks in found if hooks is not None]


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
