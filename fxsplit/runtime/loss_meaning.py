"""Find out how a user's loss function reduces the losses of rows, on the microbatches of its first steps.

A function says nothing of itself. If the loss of a microbatch is the mean of the losses of its pieces, by rows, then
the loss of a batch is the mean of those of its microbatches. If it is their sum, so is that of a batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from fxsplit.ir.facts.agreement import list_kinds, mix_rows
from fxsplit.ir.facts.chunks import Cut
from fxsplit.ir.facts.meanings import Kind
from fxsplit.runtime.microbatches import find_target_cuts
from fxsplit.runtime.program import Program
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.expectations import expect_averages
from fxsplit.torch_internals.undo import undo_after
from fxsplit.torch_internals.user_lines import warn_user

MOST_STEPS = 3
"""Steps after which a loss whose meaning is still open, such as one that is always zero, is left alone."""


class Watcher(Protocol):
    """Notes what calls of a loss function change beside computing, and puts it back."""

    def note(self) -> AbstractContextManager[None]:
        """Note what the call inside the block changes."""

    def list_changes(self) -> list[str]:
        """Return in words what each call changes, after two of them."""

    def put_back(self) -> None:
        """Give everything the value that it had before the first call."""


class LossMeaning:
    """What is known of one loss function, beside one program; its microbatches may be computed on several threads.

    looks: whether microbatches are looked at, or what is stated is believed. watch: makes what watches the function
    while it is called for that, so that those calls change nothing.
    reduction: "mean" or "sum", as the function states it, or as it was found out; None while it is open.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        stated: str | None,
        *,
        looks: bool = True,
        watch: Callable[[Callable[..., Any]], Watcher] | None = None,
    ) -> None:
        self.reduction = "mean" if stated == "batchmean" else stated
        self._loss_fn = loss_fn
        self._watch = watch
        self._changes: list[str] = []
        self._said = False
        self._steps = 0 if looks else MOST_STEPS
        self._differs = ""
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether microbatches are still looked at."""
        return self._steps < MOST_STEPS

    def begin_step(self) -> None:
        """Forget what a step noticed that then failed."""
        self._differs = ""

    def look_at(self, program: Program, outputs: Sequence[Any], target: tuple[Any, ...], rows: int) -> None:
        """Compare the loss of a microbatch, from the last stage's `outputs` for its rows, with that of its pieces."""
        with self._lock, torch.no_grad():
            try:
                with self._call_without_trace(outputs, target, program) as loss_fn:
                    kinds = _find_kinds(loss_fn, program, outputs, target, rows)
            except Exception as error:  # a loss may be made for its number of rows alone
                self._differs = self._differs or f"it does not run on pieces of a microbatch ({error})"
                return
            if len(kinds) > 1:
                return  # a loss of zero is a mean as well as a sum
            found = next(iter(kinds), None)
            if self.reduction is None:
                self.reduction = found
            if found is None or found != self.reduction:
                self._differs = "a microbatch's is neither the mean nor the sum of that of its rows"

    @contextmanager
    def _call_without_trace(
        self, outputs: Sequence[Any], target: tuple[Any, ...], program: Program
    ) -> Iterator[Callable[..., Any]]:
        """Yield the loss function, whose calls leave no trace; note what each call changes otherwise."""
        if self._watch is None:
            yield self._loss_fn
            return
        watcher = self._watch(self._loss_fn)

        def compute(*args: Any) -> Any:
            with undo_after(watcher.put_back):
                return self._loss_fn(*args)

        with undo_after(watcher.put_back), expect_averages():
            # Twice, since what the first call makes and the second one uses is a cache.
            for _ in range(2):
                with watcher.note():
                    self._loss_fn(program.build_result(outputs), *target)
            self._changes = self._changes or watcher.list_changes()
            watcher.put_back()
            yield compute

    def end_step(self) -> None:
        """Warn, once, of a loss that is not for the batch what its microbatches make, or that counts its calls."""
        if not self.is_open:
            return
        self._steps = MOST_STEPS if self.reduction is not None or self._differs else self._steps + 1
        changes, self._changes = self._changes, []
        if changes and not self._said:
            self._said = True
            warn_user(
                f"loss_fn changes {'; '.join(changes)}. A step calls it for each microbatch, not for the batch: "
                "change this in the training loop, or compile with n_microbatches=1"
            )
        if self._differs:
            warn_user(
                f"loss_fn is no mean over rows and no sum: {self._differs}. The pipeline averages it over "
                "microbatches, by rows, which differs from the loss of the whole batch: divide by the number of rows, "
                "state loss_fn.reduction = 'sum', or compile with n_microbatches=1"
            )


def _find_kinds(
    loss_fn: Callable[..., Any], program: Program, outputs: Sequence[Any], target: tuple[Any, ...], rows: int
) -> set[Kind]:
    """Return what the loss of rows is in terms of that of pieces of them: "mean" or "sum", both, or neither."""
    kinds: set[Kind] = {"mean", "sum"}
    leaves, structure = pytree.tree_flatten(target)
    tensors, n_outputs = [*outputs, *leaves], len(outputs)
    cuts = [*(meaning.cut for meaning in program.joined), *find_target_cuts(leaves, rows, program.inputs)]

    def compute(part: Sequence[Any]) -> Tensor:
        made = program.build_result(part[:n_outputs])
        return _compute(loss_fn, made, pytree.tree_unflatten(part[n_outputs:], structure))

    with expect_averages():
        # Equal losses of all pieces leave open what they mean: mixed rows may tell then.
        for mixed in (False, True):
            parts, sizes = _list_parts(tensors, cuts, rows, mixed=mixed)
            whole, *pieces = map(compute, parts)
            kinds &= list_kinds(whole, pieces, sizes, loose=whole.dtype is not torch.float64)
            if len(kinds) < 2:
                break
    return kinds


def _list_parts(
    tensors: Sequence[Any], cuts: Sequence[Cut], rows: int, *, mixed: bool
) -> tuple[list[list[Any]], tuple[int, int]]:
    """Return outputs and target of a microbatch, or of rows mixed from it, then of two pieces of it, and their sizes.

    The pieces differ in size, so that a mean is told from one weighted by rows. Fewer rows than three get more.
    """
    count = max(rows, 3)
    first = count // 2 + 1
    ranges = (range(count), range(first), range(first, count))
    parts = []
    for places in ranges:
        part = []
        for value, (dim, each) in zip(tensors, cuts, strict=True):
            if not isinstance(value, Tensor) or dim is None:
                part.append(value)
                continue
            other = mix_rows(value, dim, each)
            pool = torch.cat([other if mixed else value, mix_rows(other, dim, each) if mixed else other], dim)
            # Rows that are there first, and then those that are made of them.
            chosen = [min(i, 2 * rows - 1) * each + k for i in places for k in range(each)]
            part.append(pool.index_select(dim, torch.tensor(chosen, device=value.device)))
        parts.append(part)
    return parts, (first, count - first)


def _compute(loss_fn: Callable[..., Any], outputs: Any, target: tuple[Any, ...]) -> Tensor:
    """Return the loss of outputs and target in double precision, or in their own where it knows no other."""
    try:
        loss: Tensor = loss_fn(_widen(outputs), *_widen(target))
    except (RuntimeError, TypeError):
        loss = loss_fn(outputs, *target)
    return loss.detach()


def _widen(value: Any) -> Any:
    """Return a tree with its floats in double precision."""
    return pytree.tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, value)
