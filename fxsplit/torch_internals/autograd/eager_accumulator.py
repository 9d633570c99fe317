"""Add large gradients to their sums while autograd still computes others, so that it never holds a whole set of them.

Autograd hands over the gradients that it is asked for at its end, all at once: beside the sums they take the memory of
the weights once more. So each large leaf gets a hook for the time of a job. The hook adds a gradient to the sums of the
worker that computes it, and hands autograd a tensor without memory in its place.
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
"""Gradients of fewer bytes are handed over together: a hook takes longer than they do."""


class _Target(threading.local):
    """Where a thread adds gradients, and the ids of the leaves whose gradients it has added."""

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
    """Return what `differentiate` returns, and the ids of the leaves whose gradients are in `sums` already.

    A tensor without meaning stands for such a gradient. An `EagerAccumulator` watches these leaves. Without sums there
    are none.
    """
    _target.sums, _target.caught = sums, set()
    try:
        return differentiate(roots, gradients, ends, retain_graph), _target.caught
    finally:
        _target.sums = None


def is_caught(leaf: Tensor) -> bool:
    """Return whether the gradient of a leaf is large enough to be added to its sum while autograd still runs."""
    return leaf.layout is torch.strided and leaf.nbytes >= LEAST_BYTES


class EagerAccumulator:
    """The hooks on large leaves that hand gradients to sums; none is left when the block of `watch` ends.

    `key_of` has what the sums know a leaf by, where that is not the leaf itself.
    """

    def __init__(self, key_of: Mapping[Tensor, Tensor] | None = None) -> None:
        self._key_of = key_of or {}
        self._watched: dict[int, Tensor] = {}
        self._ended = False
        # Several threads may meet a leaf of the loss at a time.
        self._one_at_a_time = threading.Lock()
        # What autograd gets in place of the gradients of a leaf, by the leaf's id: a zero, as often as the leaf has
        # elements. Nobody reads it.
        self._nothing: dict[int, Tensor] = {}

    @contextmanager
    def watch(self, leaves: Iterable[Tensor]) -> Iterator[None]:
        """Watch those of the leaves that are large, and what `add` adds, for the block."""
        with restore_after(self._remove):
            self.add(leaves)
            yield

    def add(self, leaves: Iterable[Tensor]) -> None:
        """Watch those of the leaves that are large from now on."""
        for leaf in leaves:
            if not is_caught(leaf) or id(leaf) in self._watched:
                continue
            with self._one_at_a_time:
                self._watched[id(leaf)] = leaf
                # A handle is not made, since two threads may be given the same number for theirs. Hooks of the user's
                # come first: they are muted, and would not be called with what comes behind this one.
                if leaf._backward_hooks is None:
                    leaf._backward_hooks = OrderedDict()
                leaf._backward_hooks[id(self)] = OwnHook(self._take, leaf)
        # A thread that was given up may come here when nobody takes its hooks away any more.
        if self._ended:
            self._remove()

    def _remove(self) -> None:
        """Take all hooks away."""
        self._ended = True
        # The dictionaries stay, empty, as behind the handle of any hook: a thread that was given up may read them.
        for leaf in list(self._watched.values()):
            (leaf._backward_hooks or {}).pop(id(self), None)
        self._watched.clear()
        self._nothing.clear()

    def _take(self, leaf: Tensor, gradient: Tensor) -> Tensor | None:
        """Add a leaf's gradient to the sums of this thread, and return what autograd is to hold in its place."""
        sums = _target.sums
        # A backward of the user's own may run inside this one, as in a function that recomputes. It needs its gradient.
        if sums is None or sys._getframe(1).f_code is not differentiate.__code__:
            return None
        # Autograd refuses another layout than the gradient's.
        if gradient.layout is not torch.strided:
            return None
        key = self._key_of.get(leaf, leaf)
        total = sums.totals.get(key)
        # Asked before anything else refers to the gradient.
        unshared = _is_unshared(gradient)
        if total is None or total.layout is not torch.strided:
            sums.add([(key, gradient, unshared)])
        elif total is not key.grad and unshared and gradient.is_cpu and gradient.stride() == total.stride():
            # The same number, in the newer memory. To let go of the newest, again and again, lets glibc give its pages
            # back each time, and get them anew from the kernel: half as much processor time again on large layers.
            sums.totals[key] = gradient.add_(total)
        else:
            total.add_(gradient)
        _target.caught.add(id(leaf))
        if id(leaf) not in self._nothing:
            self._nothing[id(leaf)] = gradient.new_zeros(()).expand(gradient.shape)
        return self._nothing[id(leaf)]


def _is_unshared(gradient: Tensor) -> bool:
    """Return whether nobody but autograd, which lets go of it next, holds a gradient that a hook was called with."""
    references, holders = _count_holders()
    return sys.getrefcount(gradient) <= references and owns_its_memory(gradient, holders)


@cache
def _count_holders() -> tuple[int, int]:
    """Return the references in Python, and the holders in C++, of an unshared gradient as `_is_unshared` sees it."""
    found: list[tuple[int, int]] = []

    # Called by one function more, as `_take` calls `_is_unshared`, each of which refers to the gradient.
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
