"""Sum the gradients of microbatches outside of `.grad`, so that a step changes `.grad` once, at its end, or not at all.

The backwards of a stage add their results to the stage's `Sums`. When all workers are done, the caller merges the sums
of all stages and calls `accumulate` (see accumulate.py).

Autograd returns all requested gradients at the end of a backward. Besides the sums, they would take the memory of all
weights once more. So an `EagerAccumulator` puts a hook on each large leaf for the duration of a job:

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
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

from fxsplit.torch_internals.autograd.leaves import OwnHook
from fxsplit.torch_internals.scopes.undo import restore_after

Share = tuple[Tensor, Tensor, bool]
"""A leaf, its gradient from one microbatch, and whether nothing else refers to that gradient."""


class Sums:
    """The gradients of leaves, summed over the microbatches of one job. One worker adds; the caller reads at the end.

    `totals` has the sum for each leaf that got a gradient. The sums are not in `.grad`, because a worker that the
    caller has abandoned (Ctrl-C) may still add to them.
    """

    def __init__(self, totals: dict[Tensor, Tensor] | None = None) -> None:
        self.totals: dict[Tensor, Tensor] = totals or {}

    def add(self, shares: Iterable[Share]) -> None:
        """Add gradients to the sums of their leaves. A gradient to which something else refers is not written to."""
        totals, more = [], []
        for leaf, gradient, unshared in shares:
            total = self.totals.get(leaf)
            if total is None:
                # Later gradients are added to the sum in place, so it needs its own memory.
                self.totals[leaf] = gradient if unshared else gradient.clone()
            elif total.is_sparse:
                # torch cannot add a dense tensor to a sparse one in place, and refuses sparse + dense.
                self.totals[leaf] = gradient + total
            else:
                totals.append(total)
                more.append(gradient)
        if totals:
            # One call for all leaves, since each call releases the interpreter lock and waits to get it back.
            torch._foreach_add_(totals, more)


def differentiate(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    ends: Sequence[Tensor | GradientEdge],
    retain_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `ends`, given the gradients of `roots`; None for an end on which no root depends.

    A root or an end is a tensor or an edge of the autograd graph. This equals torch.autograd.grad(allow_unused=True),
    but without its checks of arguments, which took a third of the time of a small action.
    """
    # torch's wrapper also passes this thread's context variables to autograd's threads. Workers start none, and storing
    # the variables makes autograd copy them for each node of the graph. So skip the wrapper without threads.
    threads = torch.autograd.is_multithreading_enabled()
    run = _engine_run_backward if threads else torch.autograd.Variable._execution_engine.run_backward
    # The constants are create_graph=False and allow_unreachable=True.
    found: tuple[Tensor | None, ...] = run(
        tuple(roots), tuple(gradients), retain_graph, False, tuple(ends), True, accumulate_grad=False
    )
    return found


def make_shares(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None], unshared: Sequence[bool]) -> list[Share]:
    """Return (leaf, gradient, whether it is unshared) for each leaf that has a gradient."""
    return [(leaf, g, alone) for leaf, g, alone in zip(leaves, gradients, unshared, strict=True) if g is not None]


def find_unshared(gradients: Sequence[Tensor | None], begin: int = 0, end: int | None = None) -> list[bool]:
    """Return, for each gradient, whether no other tensor shares its memory and nothing else refers to it.

    Such a gradient may be added to in place. `gradients` must be the tuple that autograd has just returned; the entries
    from index `begin` up to `end` are checked. A gradient can be shared because autograd gives one tensor to several
    leaves, gives two views of one tensor, or keeps it, or because a hook has stored it.

    If the answer is False, `Sums.add` copies. Always copying took 5 % of a step's processor time on VGG-16 (16 rows in
    4 microbatches on two CPU workers), and no measurable time on a transformer. On a GPU it would take the memory of
    all weights once more. `bench_runtime.py -k copies` measures it.
    """
    # A slice of the tuple would hold references to the gradients.
    asked = islice(gradients, begin, end)
    return [g is not None and sys.getrefcount(g) <= _REFERENCES and owns_its_memory(g) for g in asked]


# The references of the tuple, the loop variable and the call itself. Measured, since Python versions differ in whether
# they count the last two.
(_REFERENCES,) = [sys.getrefcount(one) for one in (object(),)]


def owns_its_memory(gradient: Any, holders: int = 1) -> bool:
    """Return whether a gradient has at most `holders` C++ holders, and no other tensor shares its memory.

    A tensor that C++ code has released has one holder: its Python object.
    """
    # An expanded tensor, such as the gradient of a sum, has many elements in one place, which a write would all change.
    if (
        gradient.layout != torch.strided
        or gradient._use_count() > holders
        or torch._debug_has_internal_overlap(gradient)
    ):
        return False
    # untyped_storage() makes a handle, which counts as one holder.
    tensors = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) - 1
    if not gradient._is_view():
        return tensors == 1
    # The gradient of a linear layer's weight is a transposed product: a view, and only the view refers to its base.
    base = gradient._base
    return tensors == 2 and base._use_count() == 2 and sys.getrefcount(base) <= _count_base_references()


@cache
def _count_base_references() -> int:
    """Return the reference count of a view's base to which only the view refers, as `owns_its_memory` sees it."""
    gradient = torch.ones(2, 2).t()
    base = gradient._base
    return sys.getrefcount(base)


LEAST_BYTES = 1 << 16
"""Smaller gradients are returned by autograd as usual: a hook would take longer than the addition."""


class _Target(threading.local):
    """For each thread: the sums to which hooks add, and the ids of the leaves whose gradients were added so far."""

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
    """Return the result of `differentiate`, and the ids of the leaves whose gradients have been added to `sums`.

    The result has a placeholder for each gradient that was added. The leaves are those that an `EagerAccumulator`
    watches. If `sums` is None, no gradient is added.
    """
    _target.sums, _target.caught = sums, set()
    try:
        return differentiate(roots, gradients, ends, retain_graph), _target.caught
    finally:
        _target.sums = None


def is_caught(leaf: Tensor) -> bool:
    """Return whether a leaf is so large that a hook adds its gradient to its sum during the backward."""
    return leaf.layout is torch.strided and leaf.nbytes >= LEAST_BYTES


class EagerAccumulator:
    """The hooks on large leaves that add gradients to sums during a backward. The end of `watch` removes them.

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
        """Inside the block, watch the large tensors among the leaves, and leaves passed to `add`."""
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
        # A user's own backward inside this backward, as in a function that recomputes, needs the gradient itself.
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
            # Keep the sum in the memory of the newest gradient. If the newest block were always freed, glibc would give
            # its pages back to the kernel and request them again: 50 % more processor time on large layers.
            sums.totals[key] = gradient.add_(total)
        else:
            total.add_(gradient)
        _target.caught.add(id(leaf))
        if id(leaf) not in self._nothing:
            self._nothing[id(leaf)] = gradient.new_zeros(()).expand(gradient.shape)
        return self._nothing[id(leaf)]


def _is_unshared(gradient: Tensor) -> bool:
    """Return whether only autograd holds a gradient that was passed to a hook. Autograd drops it after the hook."""
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
