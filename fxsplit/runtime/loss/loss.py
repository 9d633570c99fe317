"""Compute the loss of a batch as a weighted sum over its microbatches.

    batch of 7 rows, 3 microbatches, mean over rows:   loss = 3/7 loss 0 + 2/7 loss 1 + 2/7 loss 2

The last stage's worker calls a `BatchLoss` once for each microbatch. That microbatch's backward starts from the weight
of its loss.
"""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.ir.facts.capture.counts import (
    COUNTS_NOTHING,
    Count,
    CountWatch,
    Weights,
    check_nothing_counts,
    find_miscounted,
)
from fxsplit.ir.facts.capture.output_kinds import MEAN, OutputKind
from fxsplit.runtime.loss.calls import Calls
from fxsplit.runtime.loss.meaning import LossMeaning
from fxsplit.runtime.microbatches import Targets, join_target
from fxsplit.runtime.program import Batch, DeferredErrors, Program
from fxsplit.runtime.stage.streams import hand_over
from fxsplit.system.user_lines import find_users_line
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.autograd.zero_gradients import keep_zeros
from fxsplit.torch_internals.nn.containers import to_plain_outputs
from fxsplit.torch_internals.tensors.accelerators import is_on_host
from fxsplit.torch_internals.thread_modes import enter_function_mode

LossFn = Callable[..., Tensor]
"""loss_fn(outputs, target), or loss_fn(outputs) if a step gets no target."""

Weigh = Callable[[int, int, torch.device], Weights]
"""From (begin, end, device): the weights of the losses of microbatches `begin` to `end - 1` in their combined loss."""

Finish = Callable[[int, tuple[Any, ...]], Tensor]
"""Computes a microbatch's loss from the last stage's outputs. Its backward starts from the loss."""


def find_own_loss(outputs: Any) -> Tensor | None:
    """Return the loss that a model has computed itself, or None if there is none.

    The loss is a float scalar: the only output, the first output, the second of a pair such as (logits, loss), or the
    output named `loss`. An output named `loss` may also have several dimensions if it has only one element.
    """
    named = isinstance(outputs, Mapping) or (not isinstance(outputs, Tensor) and hasattr(outputs, "loss"))
    if named:
        outputs = outputs.get("loss") if isinstance(outputs, Mapping) else outputs.loss
    elif isinstance(outputs, (tuple, list)) and outputs:
        outputs = outputs[1] if len(outputs) == 2 and not _is_number(outputs[0]) else outputs[0]
    if named and isinstance(outputs, Tensor) and outputs.is_floating_point() and outputs.numel() == 1:
        return outputs
    return outputs if _is_number(outputs) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 0


def find_loss_meaning(program: Program) -> OutputKind:
    """Return how the model's own loss combines over microbatches.

    A loss that is not a known output counts as a mean.
    """
    # An output with rows is not a loss.
    places = [torch.empty(1 if meaning.kind == "rows" else ()) for meaning in program.joined]
    loss = find_own_loss(program.build_result(places))
    return next((m for m, place in zip(program.joined, places, strict=True) if place is loss), MEAN)


def find_own_meaning(program: Program, n_microbatches: int) -> OutputKind:
    """Return whether the losses that a model computes for its microbatches are averaged or summed.

    Raises InputError if the batch's loss does not follow from them, for example if the loss compares rows with each
    other.
    """
    meaning = find_loss_meaning(program)
    if meaning.kind == "unjoined" and n_microbatches > 1:
        raise InputError(meaning.why)
    return meaning if meaning.kind in ("sum", "mean") else MEAN


def take_model_loss(outputs: Any) -> Tensor:
    """Return the loss among the outputs. Raises InputError if there is none."""
    loss = find_own_loss(outputs)
    if loss is None:
        raise InputError(
            "step() needs a loss, and the model returned none: pass the argument from which it computes one, such "
            "as labels=, or compile with loss_fn=, for example fxsplit.compile(model, 2, "
            "loss_fn=torch.nn.functional.cross_entropy)"
        )
    return loss if loss.ndim == 0 else loss.reshape(())


def sum_squares(outputs: Any, target: Any = None) -> Tensor:
    """Return the sum of squares of all float outputs.

    Every output gets a gradient, so a check with this loss covers all.
    """
    leaves = (leaf for leaf in pytree.tree_leaves(to_plain_outputs(outputs)) if isinstance(leaf, Tensor))
    return torch.stack([leaf.square().sum() for leaf in leaves if leaf.is_floating_point()]).sum()


# `find_reduction` reads this attribute: the sums of microbatches are added with weight 1.
sum_squares.reduction = "sum"  # type: ignore[attr-defined]


def name_loss(loss_fn: LossFn | None) -> str:
    """Return the name of a loss function in quotes, for messages."""
    function = getattr(loss_fn, "func", loss_fn)  # functools.partial
    return repr(getattr(function, "__name__", repr(function)))


def find_reduction(loss_fn: LossFn) -> str | None:
    """Return how a loss function says that it reduces the losses of rows to one number (None: it does not say).

    It says so by its attribute `reduction`, like torch's loss modules, or by an argument bound with functools.partial:
    "mean", "sum", or another text.
    """
    stated = getattr(loss_fn, "keywords", {}).get("reduction") or getattr(loss_fn, "reduction", None)
    return None if stated is None else str(stated)


def weigh_rows(reduction: str | None, rows: Sequence[int]) -> Weights:
    """Return the weight of each microbatch's loss in the combined loss. `rows` lists the rows of each microbatch.

    In a mean over rows, which is the default, the weight is the microbatch's share of the rows. In a sum it is 1.
    """
    return OutputKind("sum" if reduction == "sum" else "mean").list_weights(rows)


def find_weights(batch: Batch, targets: Targets | None, meaning: LossMeaning) -> Weigh:
    """Return a function that weighs the losses of microbatches: by the numbers that the losses divide by, if known.

    targets: the targets of the microbatches (None: the model computes its own loss).
    """
    if targets is None:
        own = find_own_meaning(batch.program, len(batch.rows))
        return lambda begin, end, device: batch.weigh(own, begin, end)

    def weigh(begin: int, end: int, device: torch.device) -> Weights:
        rows, count = batch.rows[begin:end], meaning.count  # read late: the first microbatch may set it
        if count is None:
            return weigh_rows(meaning.reduction, rows)
        # A target in host memory is counted there, so the host need not wait.
        on_host = targets.are_on_host and (isinstance(count, CountWatch) or all(map(is_on_host, count.reads)))
        pieces = [[targets.given[m] if on_host else targets.place(m, device)] for m in range(begin, end)]
        if isinstance(count, Count) and count.additive:
            return count.weigh_there(pieces, rows)
        if isinstance(count, Count):
            given = [piece for (piece,) in pieces]
            whole = join_target(given, targets.whole, sum(batch.rows), batch.program.inputs)
            return count.weigh_there(pieces, rows, [whole])
        count.weigh(pieces, rows)
        return weigh_rows(meaning.reduction, rows)

    return weigh


def describe_loss(error: BaseException) -> str:
    """Return the name of the loss function that an error comes from, with the user's line; empty for other errors.

    For example: `the loss of loss_fn 'smooth' from File "train.py", line 12`.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    place = next((i for i, (frame, _) in enumerate(frames) if frame.f_code is BatchLoss.__call__.__code__), None)
    if place is None:
        return ""
    name = frames[place][0].f_locals["self"].name
    return f"the loss{name}{find_users_line(frames[place + 1 :])}"


class BatchLoss:
    """Computes the loss of each microbatch, on the last stage's worker, and its weight in the batch's loss.

    A loss function that averages over rows (reduction "mean", or unknown) is weighted by the microbatch's share of the
    rows: with 7 rows in 3 microbatches, the weights are 3/7, 2/7 and 2/7. A loss with reduction "sum" has weight 1. In
    both cases the weighted losses of the microbatches add up to the whole batch's loss.

    meaning: the known properties of the loss function. The first microbatch may set the reduction, before any backward.
    rows: the rows of each microbatch.
    ends: if the optimizer steps between microbatches, the last microbatch before each step. The microbatches of one
        step then count as a batch of their own.
    targets: the targets, which are moved to the outputs' device (None: the loss needs only the outputs).
    weigh: returns other weights, if the number that the loss divides by is known.

    Raises InputError for a loss that is not reduced to one number.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        targets: Targets | None,
        rows: Sequence[int],
        ends: Sequence[int] = (),
        meaning: LossMeaning | None = None,
        weigh: Weigh | None = None,
    ) -> None:
        self.meaning = LossMeaning(loss_fn, find_reduction(loss_fn) or "mean") if meaning is None else meaning
        if self.meaning.reduction not in (None, "mean", "batchmean", "sum"):
            reduction = self.meaning.reduction
            raise InputError(f"loss_fn has reduction={reduction!r}: a step needs one number, use 'mean' or 'sum'")
        self._loss_fn = loss_fn
        self._targets = targets
        self._rows = rows
        self._ends = ends
        self._weigh = weigh or (lambda begin, end, device: weigh_rows(self.meaning.reduction, rows[begin:end]))
        # Losses of microbatches in other processes are put here at the end.
        self.losses: list[Tensor | None] = [None] * len(rows)
        # By thread: on a GPU another worker's stream may not have computed the weights yet.
        self._weights: dict[tuple[int, bool], Weights] = {}
        self._first = threading.Lock()  # the first microbatch takes this lock and never frees it
        self._gradients: dict[tuple[int, float], Tensor] = {}

    @property
    def given_targets(self) -> Sequence[Any]:
        """The target of each microbatch, as the user gave it."""
        return () if self._targets is None else self._targets.given

    @property
    def target(self) -> Any:
        """The target of the whole batch, as the user gave it; None for a loss of only the outputs."""
        return None if self._targets is None else self._targets.whole

    @property
    def name(self) -> str:
        """The name of the loss function, for errors; empty if the model computes its loss itself."""
        return "" if self._loss_fn is take_model_loss else f" of loss_fn {name_loss(self._loss_fn)}"

    def finish(self, program: Program, microbatch: int, outputs: Sequence[Any]) -> Tensor:
        """Return the loss of a microbatch from the outputs of the last stage of a program.

        In the first steps, this first finds out how the losses of microbatches combine.
        """
        look = partial(self._look_at, program, microbatch, outputs)
        if self.meaning.steps_left:
            look()
        return self(microbatch, program.build_result(outputs), look)

    def _look_at(self, program: Program, microbatch: int, outputs: Sequence[Any]) -> None:
        """Find out from a microbatch whether losses make a mean or a sum. `outputs`: the last stage's outputs."""
        target = self._list_target(microbatch, outputs)
        self.meaning.look_at(program, outputs, target, self._rows[microbatch])

    def _list_target(self, microbatch: int, outputs: Any) -> tuple[Any, ...]:
        """Return the microbatch's target on its outputs' device, or nothing for a loss of only the outputs."""
        if self._targets is None:
            return ()
        leaves = [outputs] if isinstance(outputs, Tensor) else pytree.tree_leaves(to_plain_outputs(outputs))
        device = next((v.device for v in leaves if isinstance(v, Tensor)), None)
        return (self._targets.given[microbatch] if device is None else self._targets.place(microbatch, device),)

    def _list_weights(self, device: torch.device, *, in_batch: bool) -> Weights:
        """Return the weight of each microbatch's loss.

        in_batch: the weights in the reported loss of the whole batch. Otherwise, the weights in the loss of one
            optimizer step, from which the gradients are computed.
        """
        key = threading.get_ident(), in_batch or not self._ends
        if key not in self._weights:
            bounds = itertools.pairwise([0, *(m + 1 for m in self._ends if not key[1]), len(self._rows)])
            parts = [self._weigh(begin, end, device) for begin, end in bounds if begin < end]
            self._weights[key] = [w for part in parts for w in part]
        return self._weights[key]

    def __call__(self, microbatch: int, outputs: Any, look_again: Callable[[], None] = lambda: None) -> Tensor:
        """Return the loss of one microbatch, a scalar with an autograd graph, from the model's outputs.

        look_again: called if the loss function makes other calls than in earlier steps.
        Raises InputError for a loss that is not a scalar tensor or has no gradient. An error of the loss function is
        raised with a note.
        """
        target = self._list_target(microbatch, outputs)
        calls = Calls(outputs, target) if self.meaning.listens and self._first.acquire(blocking=False) else None
        try:
            with nullcontext() if calls is None else enter_function_mode(calls):
                loss = self._loss_fn(outputs, *target)
        except Exception as error:
            error.add_note("raised by loss_fn")
            raise
        if calls is not None and self.meaning.hear(calls.heard):
            look_again()
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"loss_fn returned {what}: return a scalar tensor, such as the mean over rows")
        if not loss.requires_grad:
            raise InputError(
                "the loss does not depend on anything that wants a gradient, so a step would train nothing: is every "
                "parameter frozen, or the output detached inside loss_fn?"
            )
        # The loss is kept until the end of the step. Clone it if it holds memory for all elements, as torch's mse_loss.
        own = loss.detach()
        self.losses[microbatch] = own.clone() if own.untyped_storage().nbytes() > own.nbytes else own
        if not is_on_host(loss) and self.divides:
            keep_zeros([loss])
        return loss

    def make_output_gradients(self, microbatch: int) -> list[Tensor | None]:
        """Return the gradient from which the backward of a microbatch's loss starts. This is the weight of that loss.

        Returns [None] for weight zero: then no backward is needed.
        """
        loss = self.losses[microbatch]
        assert loss is not None, "the backward of a loss comes after it"
        weight = self._list_weights(loss.device, in_batch=False)[microbatch]
        if isinstance(weight, Tensor):
            return [weight.to(loss)]
        if not weight:
            check_nothing_counts(loss, f"the loss of microbatch {microbatch}")
            return [None]
        key = threading.get_ident(), weight
        if key not in self._gradients:
            self._gradients[key] = torch.full_like(loss, weight)
        return [self._gradients[key]]

    def list_losses(self) -> list[Tensor]:
        """Return the loss of each microbatch, detached. Call it after all losses are computed."""
        return [loss for loss in self.losses if loss is not None]

    @property
    def divides(self) -> bool:
        """Whether the loss divides by a count that may be zero, so that gradients may be 0 / 0."""
        return isinstance(self.meaning.count, Count) and not self.meaning.count.safe

    def compute_total(self, program: Program | None = None) -> Tensor:
        """Return the loss of the whole batch, detached. Call it after all losses are computed.

        Warns if this differs from the loss function's value for the whole batch.
        program: raises, in a later batch, errors that only an accelerator knows of.
        """
        # If torch itself computes the mean, 0 / 0 is its own result and needs no check.
        checks = program is not None and (program.keeps_zeros or self.divides)
        late = program.deferred_errors if program is not None and checks else None
        self.meaning.end_step()
        hand_over(self.losses)
        losses = self.list_losses()
        found = torch.stack([loss.to(losses[0].device) for loss in losses])
        # Usually a worker has computed the weights already.
        made = (weights for (_, in_batch), weights in self._weights.items() if in_batch)
        weights = next(made, None) or self._list_weights(found.device, in_batch=True)
        hand_over(weights)
        # In double precision: in a half-precision loss, a share such as 1/3 would lose digits.
        return sum_weighted(found.double(), weights, late).to(found.dtype)


def sum_weighted(values: Tensor, weights: Weights, late: DeferredErrors | None = None) -> Tensor:
    """Return the weighted sum of the losses of microbatches.

    A microbatch without entries that count has weight zero. Its loss is 0 / 0, so NaN, and is left out. If the loss is
    not NaN, the loss function counts in another way than assumed: `late` then raises an error. For losses on an
    accelerator it does so in a later batch, so that the host need not wait.
    """
    tensors = [weight.to(values) for weight in weights if isinstance(weight, Tensor)]
    if tensors:
        factors = torch.stack(tensors)
        if late is not None:
            late.expect(find_miscounted(values, factors), f"the loss of a microbatch is not 0 / 0: {COUNTS_NOTHING}")
        return (values * factors).where(factors != 0, 0.0).sum()
    # Most weights are equal, so add in groups. Leave out weight zero: that microbatch may have divided by zero.
    total, begin = values.new_zeros(()), 0
    for weight, equal in itertools.groupby(weights):
        end = begin + len(list(equal))
        if weight:
            total = total + values[begin:end].sum() * weight
        begin = end
    return total
