"""Add large gradients to their sums while a backward still runs, so that it never holds a full set of gradients.

Autograd returns all requested gradients at the end of a backward. Besides the sums, they would take the memory of all
weights once more. So each large leaf gets a hook for the duration of a job:

    backward computes the gradient of a leaf
        -> hook: total += gradient, in the sums of the worker that runs the backward
        -> autograd keeps an expanded zero instead, which takes no memory
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fxsplit.torch_internals.autograd.leaves import OwnHook
from fxsplit.torch_internals.autograd.sums import Sums, differentiate, owns_its_memory
from fxsplit.torch_internals.scopes.undo import restore_after

LEAST_BYTES = 1 << 16
"""Smaller gradients are returned by autograd as usual: a hook would take longer than the addition."""


class _Target(threading.local):
    """Per thread: the sums to add to, and the ids of the leaves with gradients added so far."""

    sums: Sums | None = None

    def __init__(self) -> None:
        self.caught: set[int] = set()


_target = _Target()


def differentiate_into(
    sums: Sums | None,
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    ends: Sequence[Tensor | GradientEdge],
    retain_graph: bool = False,
) -> tuple[tuple[Tensor | None, ...], set[int]]:
    """Return the result of `differentiate`, and the ids of the leaves with gradients already in `sums`.

    The result has a placeholder for each such gradient. These are leaves that an `EagerAccumulator` watches. If `sums`
    is None, there are none.
    """
    _target.sums, _target.caught = sums, set()
    try:
        return differentiate(roots, gradients, ends, retain_graph), _target.caught
    finally:
        _target.sums = None


def is_caught(leaf: Tensor) -> bool:
    """Return whether a leaf's gradient is large enough to be added to its sum during the backward."""
    return leaf.layout is torch.strided and leaf.nbytes >= LEAST_BYTES


class EagerAccumulator:
    """The hooks on large leaves that add gradients to sums. All are removed at the end of the block of `watch`.

    key_of: the key of a leaf in the sums, if it is not the leaf itself.
    """

    def __init__(self, key_of: Mapping[Tensor, Tensor] | None = None) -> None:
        self._key_of = key_of or {}
        self._watched: dict[int, Tensor] = {}
        self._ended = False
        # Several threads may find a leaf of the loss function at the same time.
        self._one_at_a_time = threading.Lock()
        # The placeholder that autograd gets for each leaf's gradient, by the leaf's id: an expanded zero that nothing
        # reads.
        self._nothing: dict[int, Tensor] = {}

    @contextmanager
    def watch(self, leaves: Iterable[Tensor]) -> Iterator[None]:
        """Watch the large tensors among the leaves for the block, and leaves passed to `add` inside it."""
        with restore_after(self._remove):
            self.add(leaves)
            yield

    def add(self, leaves: Iterable[Tensor]) -> None:
        """Watch the large tensors among the leaves from now on."""
        for leaf in leaves:
            if not is_caught(leaf) or id(leaf) in self._watched:
                continue
            with self._one_at_a_time:
                self._watched[id(leaf)] = leaf
                # Without a hook handle, since two threads might get the same handle id. The user's hooks run first;
                # they are muted, and must not see the placeholder of this hook.
                if leaf._backward_hooks is None:
                    leaf._backward_hooks = OrderedDict()
                leaf._backward_hooks[id(self)] = OwnHook(self._take, leaf)
        # A thread that was abandoned may get here after `watch` has ended.
        if self._ended:
            self._remove()

    def _remove(self) -> None:
        """Remove all hooks."""
        self._ended = True
        # Keep the empty dictionaries, as torch does after a hook is removed: an abandoned thread may read them.
        for leaf in list(self._watched.values()):
            (leaf._backward_hooks or {}).pop(id(self), None)
        self._watched.clear()
        self._nothing.clear()

    def _take(self, leaf: Tensor, gradient: Tensor) -> Tensor | None:
        """Add a leaf's gradient to the sums of this thread, and return the placeholder that autograd keeps."""
        sums = _target.sums
        # A user's own backward inside this one, as in a function that recomputes, needs its gradient.
        if sums is None or sys._getframe(1).f_code is not differentiate.__code__:
            return None
        # Autograd refuses a placeholder with another layout than the gradient's.
        if gradient.layout is not torch.strided:
            return None
        key = self._key_of.get(leaf, leaf)
        total = sums.totals.get(key)
        # Check before anything else refers to the gradient.
        unshared = _is_unshared(gradient)
        if total is None or total.layout is not torch.strided:
            sums.add([(key, gradient, unshared)])
        elif total is not key.grad and unshared and gradient.is_cpu and gradient.stride() == total.stride():
            # The same sum, in the newer memory. If the newest block were always freed, glibc would return its pages to
            # the kernel and request them again: 50 % more processor time on large layers.
            sums.totals[key] = gradient.add_(total)
        else:
            total.add_(gradient)
        _target.caught.add(id(leaf))
        if id(leaf) not in self._nothing:
            self._nothing[id(leaf)] = gradient.new_zeros(()).expand(gradient.shape)
        return self._nothing[id(leaf)]


def _is_unshared(gradient: Tensor) -> bool:
    """Return whether only autograd, which will drop it next, holds a gradient passed to a hook."""
    references, holders = _count_holders()
    return sys.getrefcount(gradient) <= references and owns_its_memory(gradient, holders)


@cache
def _count_holders() -> tuple[int, int]:
    """Return the Python references and C++ holders of an unshared gradient, as `_is_unshared` sees it."""
    found: list[tuple[int, int]] = []

    # One more function call, as in `_take` calling `_is_unshared`, since each call refers to the gradient.
    def take(leaf: Tensor, gradient: Tensor) -> None:
        look(gradient)

    def look(gradient: Any) -> None:
        found.append((sys.getrefcount(gradient), gradient._use_count()))

    leaf = torch.ones(2, device="cpu", requires_grad=True)
    leaf._backward_hooks = OrderedDict({0: OwnHook(take, leaf)})
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        root = leaf.exp().sum()
    differentiate([root], [torch.ones_like(root)], [leaf])
    return found[0]
