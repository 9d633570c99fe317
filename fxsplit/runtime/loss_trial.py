"""Try a loss function on a microbatch and on pieces of it: what its loss is in terms of theirs, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit.ir.facts.agreement import is_close, list_kinds, mix_rows
from fxsplit.ir.facts.chunks import Cut
from fxsplit.ir.facts.meanings import Kind
from fxsplit.runtime.microbatches import find_target_cuts
from fxsplit.runtime.program import Program
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.expectations import expect_averages


class LossTrial:
    """A loss function beside the last stage's `outputs` and the `target` for so many `rows`."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        program: Program,
        outputs: Sequence[Any],
        target: tuple[Any, ...],
        rows: int,
    ) -> None:
        self._loss_fn = loss_fn
        self._program = program
        self._rows = rows
        leaves, self._structure = pytree.tree_flatten(target)
        self._tensors, self._n_outputs = [*outputs, *leaves], len(outputs)
        self._cuts = [
            *(meaning.cut for meaning in program.joined),
            *find_target_cuts(leaves, rows, program.inputs),
        ]

    def find_kinds(self) -> set[Kind]:
        """Return what the loss of rows is in terms of that of pieces of them: "mean" or "sum", both, or neither."""
        kinds: set[Kind] = {"mean", "sum"}
        with expect_averages():
            # Equal losses of all pieces leave open what they mean: mixed rows may tell then.
            for mixed in (False, True):
                parts, sizes = _list_parts(self._tensors, self._cuts, self._rows, mixed=mixed)
                whole, *pieces = map(self._compute, parts)
                kinds &= list_kinds(whole, pieces, sizes, loose=whole.dtype is not torch.float64)
                if len(kinds) < 2:
                    break
        return kinds

    def compares_rows(self, kind: Kind) -> bool:
        """Return whether gradients of rows are others than in pieces of them, although the loss is their `kind`."""
        parts, sizes = _list_parts(self._tensors, self._cuts, self._rows, mixed=False)
        try:
            with torch.enable_grad(), expect_averages():
                whole, *pieces = map(self._compute_gradients, parts)
        except (RuntimeError, TypeError):  # without a gradient there is nothing to compare, and the step says so
            return False
        shares = [size / sum(sizes) if kind == "mean" else 1.0 for size in sizes]
        floats = [g for g in whole if g.numel() and (g.is_floating_point() or g.is_complex())]
        largest = max((float(g.abs().nan_to_num(0.0, 0.0, 0.0).max()) for g in floats), default=0.0)
        for gradient, cut, *parted in zip(whole, self._cuts, *pieces, strict=False):
            if cut.dim is None or not (gradient.is_floating_point() or gradient.is_complex()):
                continue
            joined = cut.join([g * share for g, share in zip(parted, shares, strict=True)])
            if not is_close(gradient, joined, largest, loose=gradient.dtype is not torch.float64):
                return True
        return False

    def _compute(self, part: Sequence[Any]) -> Tensor:
        """Return the loss in double precision, or in its own where the function knows no other."""
        try:
            return self._call([_widen(value) for value in part]).detach()
        except (RuntimeError, TypeError):
            return self._call(part).detach()

    def _compute_gradients(self, part: Sequence[Any]) -> list[Tensor]:
        """Return the gradient of the loss for each output."""
        outputs = [_widen(value).detach() for value in part[: self._n_outputs]]
        trained = [output for output in outputs if output.is_floating_point() or output.is_complex()]
        for output in trained:
            output.requires_grad_()
        # Clones: a function may write to what it is given.
        loss = self._call([*(o.clone() for o in outputs), *map(_widen, part[self._n_outputs :])])
        found = iter(torch.autograd.grad(loss, trained, allow_unused=True))
        made = [(o, next(found) if o.requires_grad else None) for o in outputs]
        return [torch.zeros_like(o) if g is None else g for o, g in made]

    def _call(self, part: Sequence[Any]) -> Tensor:
        """Return the loss of outputs and target, which lie in one list."""
        made = self._program.build_result(part[: self._n_outputs])
        loss: Tensor = self._loss_fn(made, *pytree.tree_unflatten(list(part[self._n_outputs :]), self._structure))
        return loss


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


def _widen(value: Any) -> Any:
    """Return a tensor of floats in double precision, and any other value as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
