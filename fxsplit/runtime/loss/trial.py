"""Compare a loss function's value for a microbatch with its values for pieces of the microbatch.

The comparison shows how losses combine: by a mean, a sum, or a mean weighted by counts. It also compares gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fxsplit.ir.facts.capture.agreement import is_close, list_kinds, mix_rows
from fxsplit.ir.facts.capture.chunks import ChunkSpec
from fxsplit.ir.facts.capture.counts import Count
from fxsplit.ir.facts.capture.output_kinds import Kind, OutputKind
from fxsplit.runtime.microbatches import find_target_cuts
from fxsplit.runtime.program import Program
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.nn.expectations import expect_averages

Counts = Sequence[Count]

VARIED = 0.25
"""The amplitude of changes to an output without rows, as a share of its largest number."""


class LossTrial:
    """Calls a loss function on a microbatch, called the *whole*, and on two pieces of it.

    outputs, target: the last stage's outputs for the microbatch, which has `rows` rows, and its target.
    """

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
        targets = find_target_cuts(leaves, rows, program.inputs)
        self._cuts = [*(meaning.cut for meaning in program.joined), *targets]
        of_target = (
            OutputKind("same") if cut.dim is None else OutputKind("rows", cut.dim, cut.each) for cut in targets
        )
        self._meanings = [*program.joined, *of_target]

    def find_kinds(self) -> set[Kind]:
        """Return how the loss of the whole follows from the losses of pieces: "mean" or "sum", both, or neither."""
        kinds: set[Kind] = {"mean", "sum"}
        with expect_averages():
            # If all pieces have equal losses, mean and sum may both fit. Then try rows that are mixed from the given.
            for mixed in (False, True):
                parts, sizes = self._list_parts(mixed=mixed)
                whole, *pieces = map(self._compute, parts)
                kinds &= list_kinds(whole, pieces, sizes, loose=whole.dtype is not torch.float64)
                if len(kinds) < 2:
                    break
        return kinds

    def find_unjoined(self) -> str | None:
        """Return why an output cannot be joined from microbatches, if the loss depends on such an output, else None."""
        for i, meaning in enumerate(self._meanings):
            value = self._tensors[i]
            if meaning.kind != "unjoined" or not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            with expect_averages():
                before, after = (
                    self._compute([*self._tensors[:i], v, *self._tensors[i + 1 :]])
                    for v in (value, _vary(value, VARIED))
                )
            if not is_close(before, after, float(before.abs().nan_to_num().max()), loose=True):
                return meaning.why
        return None

    def try_counts(self, kinds: set[Kind], counts: Sequence[Count], marks: Sequence[float]) -> tuple[set[Kind], Counts]:
        """Return which of `kinds` hold for any target, and which of `counts` the loss may be divided by.

        In one batch, all rows may happen to count the same number of entries, so that several kinds and counts fit. To
        tell them apart, this changes entries of the target and compares again.
        marks: numbers that the loss may treat specially, such as an ignored label. Entries are set to them too.
        """
        with expect_averages():
            parts, sizes = self._list_parts(mixed=False)
            counts = self._list_holding(counts, parts, sizes)
            # If a piece counts nothing, a loss may be 0 / 0, or divided by one.
            for varied in self._list_varied(parts, sizes, marks, whole_piece=False):
                kinds, counts = self._narrow(kinds, counts, varied, sizes)
                if not kinds and not counts:
                    return kinds, counts
            for varied in self._list_varied(parts, sizes, marks, whole_piece=True) if counts else ():
                counts = self._narrow(set(), counts, varied, sizes)[1]
        return kinds, counts

    def _narrow(
        self, kinds: set[Kind], counts: Counts, parts: list[list[Any]], sizes: tuple[int, int]
    ) -> tuple[set[Kind], Counts]:
        """Return the kinds and counts that still hold for a changed whole and its pieces.

        If the loss function fails on the changed values, they show nothing, and all kinds and counts are returned.
        """
        # A function may check its target, and torch refuses invalid classes.
        try:
            whole, *pieces = map(self._compute, parts)
        except Exception:
            return kinds, counts
        kinds = kinds & list_kinds(whole, pieces, sizes, loose=whole.dtype is not torch.float64)
        return kinds, self._list_holding(counts, parts, sizes, [whole, *pieces])

    def _list_holding(
        self,
        counts: Counts,
        parts: list[list[Any]],
        sizes: tuple[int, int],
        losses: Sequence[Tensor] = (),
    ) -> Counts:
        """Return the counts by which the losses of two pieces, weighted, add up to the loss of the whole.

        losses: the three losses, if they are known already.
        """
        if not counts:
            return counts
        whole, *pieces = losses or map(self._compute, parts)
        held = []
        for count in counts:
            with suppress(Exception):  # such as a divisor for each row
                weights = self._weigh(count, parts, sizes)
                # A step refuses a piece that has weight zero but a loss that is not NaN, so it does not rule out the
                # count.
                if any(not w and not (p.isnan() or p == 0) for p, w in zip(pieces, weights, strict=True)):
                    held.append(count)
                    continue
                found = torch.stack([p * w for p, w in zip(pieces, weights, strict=True) if w]).sum(0)
                loose = whole.dtype is not torch.float64
                if is_close(whole, found.to(whole.dtype), float(whole.abs().nan_to_num(0.0, 0.0, 0.0)), loose=loose):
                    held.append(count)
        return held

    def _weigh(self, count: Count, parts: list[list[Any]], sizes: tuple[int, int]) -> list[float]:
        """Return the weights of the losses of two pieces in the loss of the whole, by a count of their targets."""
        whole, *pieces = [list(self._take_target(part)) for part in parts]
        return count.weigh(pieces, sizes, whole)

    def _list_varied(
        self, parts: list[list[Any]], sizes: tuple[int, int], marks: Sequence[float], *, whole_piece: bool
    ) -> Iterator[list[list[Any]]]:
        """Yield the whole and its two pieces, each time with changed entries in one tensor of the target or outputs.

        whole_piece: change all entries of the second piece. Otherwise, change every second entry of the first piece.
        """
        first = sizes[0]
        for i, (value, cut) in enumerate(zip(parts[0], self._cuts, strict=True)):
            if not isinstance(value, Tensor) or cut.dim is None or not value.numel():
                continue
            is_output = i < self._n_outputs
            for entries, is_safe in _list_others(value, () if is_output else marks, spread=is_output):
                chosen = _choose_entries(cut, value, sizes, whole_piece=whole_piece)
                changed = torch.where(chosen, entries, value)
                if torch.equal(changed, value):
                    continue
                made = [changed, cut.narrow(changed, 0, first), cut.narrow(changed, first, sizes[1])]
                varied = [[*part[:i], new, *part[i + 1 :]] for part, new in zip(parts, made, strict=True)]
                # On an accelerator an invalid class would end the process, so try it on the host.
                yield varied if is_safe else [[_to_host(v) for v in part] for part in varied]

    def compares_rows(self, found: Kind | Count) -> bool:
        """Return whether gradients of rows differ between the whole and its pieces.

        found: how the losses themselves combine. A loss that compares rows only in its gradient is, for example, a loss
            divided by a detached loss.
        """
        parts, sizes = self._list_parts(mixed=False)
        try:
            with torch.enable_grad(), expect_averages():
                whole, *pieces = map(self._compute_gradients, parts)
        except (RuntimeError, TypeError):  # without a gradient there is nothing to compare, and the step says so
            return False
        shares = [size / sum(sizes) if found == "mean" else 1.0 for size in sizes]
        if isinstance(found, Count):
            shares = self._weigh(found, parts, sizes)
        floats = [g for g in whole if g.numel() and (g.is_floating_point() or g.is_complex())]
        largest = max((float(g.abs().nan_to_num(0.0, 0.0, 0.0).max()) for g in floats), default=0.0)
        for gradient, cut, *parted in zip(whole, self._cuts, *pieces, strict=False):
            if cut.dim is None or not (gradient.is_floating_point() or gradient.is_complex()):
                continue
            joined = cut.join(
                [g * share if share else torch.zeros_like(g) for g, share in zip(parted, shares, strict=True)]
            )
            if not is_close(gradient, joined, largest, loose=gradient.dtype is not torch.float64):
                return True
        return False

    def _list_parts(self, *, mixed: bool) -> tuple[list[list[Any]], tuple[int, int]]:
        """Return the outputs and target of the whole and of two pieces, and the number of rows of each piece.

        The pieces differ in size: only then does a plain mean differ from a mean weighted by rows. If there are fewer
        than three rows, rows that are mixed from the given rows are added.
        mixed: use only mixed rows.
        """
        count = max(self._rows, 3)
        first = count // 2 + 1
        sizes = (first, count - first)
        ranges = (range(count), range(first), range(first, count))
        parts: list[list[Any]] = [[], [], []]
        for value, meaning in zip(self._tensors, self._meanings, strict=True):
            if isinstance(value, Tensor) and meaning.kind == "rows":
                found = self._list_rows(value, meaning, ranges, mixed=mixed)
            else:
                found = _list_shares(value, meaning.kind, self._rows, sizes)
            for part, one in zip(parts, found, strict=True):
                part.append(one)
        return parts, sizes

    def _list_rows(self, value: Tensor, meaning: OutputKind, ranges: Sequence[range], *, mixed: bool) -> list[Tensor]:
        """Return, for each range, the rows with these numbers. Rows beyond the tensor's own are mixed from them."""
        dim, each = meaning.dim, meaning.each
        other = mix_rows(value, dim, each)
        pool = torch.cat([other if mixed else value, mix_rows(other, dim, each) if mixed else other], dim)
        found = []
        for places in ranges:
            # The pool has the given rows first, and then rows mixed from them.
            chosen = [min(i, 2 * self._rows - 1) * each + k for i in places for k in range(each)]
            found.append(pool.index_select(dim, torch.tensor(chosen, device=value.device)))
        return found

    def _compute(self, part: Sequence[Any]) -> Tensor:
        """Return the loss of a list of outputs and target, in double precision if the function accepts double."""
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
        loss = self._call([*outputs, *map(_widen, part[self._n_outputs :])])
        found = iter(torch.autograd.grad(loss, trained, allow_unused=True))
        made = [(o, next(found) if o.requires_grad else None) for o in outputs]
        return [torch.zeros_like(o) if g is None else g for o, g in made]

    def _call(self, part: Sequence[Any]) -> Tensor:
        """Return the loss of a list that holds the outputs, followed by the tensors of the target."""
        # Clone: a function may write to its arguments, and other calls get the same tensors or parts of them.
        part = [value.clone() if isinstance(value, Tensor) else value for value in part]
        made = self._program.build_result(part[: self._n_outputs])
        loss: Tensor = self._loss_fn(made, *self._take_target(part))
        return loss

    def _take_target(self, part: Sequence[Any]) -> tuple[Any, ...]:
        """Return the target from a list that holds the outputs, followed by the tensors of the target."""
        made: tuple[Any, ...] = pytree.tree_unflatten(list(part[self._n_outputs :]), self._structure)
        return made


def _list_shares(value: Any, kind: str, rows: int, sizes: tuple[int, int]) -> list[Any]:
    """Return values of an output without rows: for the whole and for two pieces, so that they combine as `kind` says.

    A sum is divided in proportion to the rows. A mean is raised in one piece and lowered in the other.
    """
    if not isinstance(value, Tensor) or value.dtype is torch.bool or kind in ("same", "unjoined"):
        return [value] * 3
    if kind == "sum":
        shares = [_widen(value) * (size / rows) for size in (sum(sizes), *sizes)]
        # Counts stay integers.
        return (
            shares if value.is_floating_point() or value.is_complex() else [s.round().to(value.dtype) for s in shares]
        )
    return [value, _vary(value, VARIED), _vary(value, -VARIED * sizes[0] / sizes[1])]


def _list_others(value: Tensor, marks: Sequence[float], *, spread: bool) -> Iterator[tuple[Tensor, bool]]:
    """Yield other entries for a tensor, each with a flag that says whether any loss function must accept them.

    For classes and lengths, the other entries are smaller; for masks, the opposite.
    marks: further values to set all entries to. spread: the tensor is an output, whose entries become far apart.
    """
    if value.dtype is torch.bool:
        yield ~value, True
        return
    if spread:
        if value.is_floating_point():
            yield torch.where(_count_entries(value) % 4 < 2, 30.0, -0.03).to(value.dtype) * value, False
        return
    if value.is_floating_point():
        yield (value == 0).to(value.dtype), True
    elif not value.is_complex():
        yield torch.where(value > 0, value // 2, torch.where(value == 0, 1, value)), True
    for mark in marks:
        fits = value.is_floating_point() or (mark == mark and mark == int(mark))
        if fits and not value.is_complex():
            with suppress(RuntimeError):  # a small dtype may not hold this value
                yield torch.full_like(value, mark), False


def _choose_entries(cut: ChunkSpec, value: Tensor, sizes: tuple[int, int], *, whole_piece: bool) -> Tensor:
    """Return a mask of the entries to change: all of the second piece, or every second entry of the first."""
    chosen = torch.zeros(value.shape, dtype=torch.bool, device=value.device)
    if whole_piece:
        cut.narrow(chosen, sizes[0], sizes[1]).fill_(True)
    else:
        first = cut.narrow(chosen, 0, sizes[0])
        first.copy_(_count_entries(first) % 2 == 0)
    return chosen


def _count_entries(value: Tensor) -> Tensor:
    """Return a tensor of the same shape that numbers the entries, in row-major order."""
    return torch.arange(value.numel(), device=value.device).reshape(value.shape)


def _to_host(value: Any) -> Any:
    """Return a tensor in host memory, and any other value as it is."""
    return value.cpu() if isinstance(value, Tensor) else value


def _vary(value: Tensor, share: float) -> Tensor:
    """Return floats changed by up to `share` of their largest magnitude. Each entry changes by a different amount.

    If all entries changed by the same amount, a cross entropy of these scores would not change.
    """
    if not (value.is_floating_point() or value.is_complex()):
        return value
    largest = value.abs().nan_to_num(0.0, 0.0, 0.0).max() if value.numel() else 0.0
    wave = torch.arange(value.numel(), dtype=torch.float64, device=value.device).cos().reshape(value.shape)
    return value + share * largest * wave.to(value.dtype)


def _widen(value: Any) -> Any:
    """Return a float tensor in double precision, and any other value as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
