"""The loss of a batch as a sum over its microbatches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.runtime.streams import hand_over
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.containers import to_plain_outputs

LossFn = Callable[..., Tensor]

Finish = Callable[[int, tuple[Any, ...]], Tensor]
"""Computes a microbatch's loss from the last stage's outputs; its backward starts there."""


def find_own_loss(outputs: Any) -> Tensor | None:
    """Return the loss that a model has computed itself: its only output, its first one, or the one called `loss`."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("loss")
    elif not isinstance(outputs, Tensor) and hasattr(outputs, "loss"):
        outputs = outputs.loss
    elif isinstance(outputs, (tuple, list)) and outputs:
        outputs = outputs[0]
    number = isinstance(outputs, Tensor) and outputs.ndim == 0 and outputs.is_floating_point()
    return outputs if number else None


def take_model_loss(outputs: Any) -> Tensor:
    """Return the loss that is in the outputs; raises InputError where there is none."""
    loss = find_own_loss(outputs)
    if loss is None:
        raise InputError(
            "step() needs a loss, and the model returns none of its own: compile with loss_fn=, for example "
            "fxsplit.compile(model, 2, loss_fn=torch.nn.functional.cross_entropy)"
        )
    return loss


def sum_squares(outputs: Any, target: Any = None) -> Tensor:
    """Return the sum of squares of all float outputs, a loss that every one of them matters to."""
    leaves = (leaf for leaf in pytree.tree_leaves(to_plain_outputs(outputs)) if isinstance(leaf, Tensor))
    return torch.stack([leaf.square().sum() for leaf in leaves if leaf.is_floating_point()]).sum()


sum_squares.reduction = "sum"  # type: ignore[attr-defined]


def find_reduction(loss_fn: LossFn) -> str:
    """Return how a loss function reduces rows: its `reduction`, also one bound by functools.partial; else "mean"."""
    bound = getattr(loss_fn, "keywords", {}).get("reduction")
    return str(bound or getattr(loss_fn, "reduction", "mean"))


class BatchLoss:
    """Computes the loss of each microbatch, on the last stage's worker, and what it weighs in the batch's.

    A loss function that averages over rows (reduction "mean", or none stated) is weighted by the microbatch's share
    of the rows; one with `reduction == "sum"` is summed. Either way they add up to the whole batch's loss. Where
    the optimizer steps between microbatches, `ends` are the last ones before each step, and what goes into one step is
    a batch of its own. Without targets the loss is computed from outputs alone.
    """

    def __init__(
        self, loss_fn: LossFn, targets: Sequence[Any] | None, rows: Sequence[int], ends: Sequence[int] = ()
    ) -> None:
        reduction = find_reduction(loss_fn)
        if reduction not in ("mean", "batchmean", "sum"):
            raise InputError(f"loss_fn has reduction={reduction!r}: a step needs one number, use 'mean' or 'sum'")
        self._loss_fn = loss_fn
        self._targets = targets
        self._weights = [1.0] * len(rows)  # in the loss of its step's batch
        self._of_all = [1.0] * len(rows)  # and in the whole batch's
        begin = 0
        for end in [*(m + 1 for m in ends), len(rows)]:
            own = sum(rows[begin:end])
            for m in range(begin, end) if reduction != "sum" else ():
                self._weights[m], self._of_all[m] = rows[m] / own, rows[m] / sum(rows)
            begin = end
        self._losses: list[Tensor | None] = [None] * len(rows)
        self._seeds: dict[tuple[float, int], Tensor] = {}  # of each worker its own: others may be ahead of its device

    def __call__(self, microbatch: int, outputs: Any) -> Tensor:
        """Return the loss of one microbatch, from the model's outputs for it."""
        try:
            target = () if self._targets is None else (self._targets[microbatch],)
            loss = self._loss_fn(outputs, *target)
        except Exception as error:
            error.add_note("raised by loss_fn")
            raise
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"loss_fn returned {what}: return a scalar tensor, such as the mean over rows")
        if not loss.requires_grad:
            raise InputError(
                "the loss does not depend on anything that wants a gradient, so a step would train nothing: is every "
                "parameter frozen, or the output detached inside loss_fn?"
            )
        self._losses[microbatch] = loss.detach()
        return loss

    def make_output_gradients(self, microbatch: int) -> list[Tensor | None]:
        """Return the gradient that the backward of a microbatch's loss starts from: its weight in the batch's."""
        weight = self._weights[microbatch]
        key = weight, threading.get_ident()
        if key not in self._seeds:
            self._seeds[key] = torch.full_like(self._losses[microbatch], weight)  # type: ignore[arg-type]
        return [self._seeds[key]]

    def compute_total(self) -> Tensor:
        """Return the loss of the whole batch, detached."""
        hand_over(self._losses)
        losses = [loss for loss in self._losses if loss is not None]
        found = torch.stack([loss.to(losses[0].device) for loss in losses])
        weights = torch.tensor(self._of_all, dtype=torch.float64, device=found.device)  # not rounded to half precision
        return (found * weights).sum().to(found.dtype)
