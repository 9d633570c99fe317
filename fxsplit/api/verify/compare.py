"""Compare a pipeline with the unsplit model, run microbatch by microbatch: outputs, gradients, buffers.

verify(), the tests and the benchmarks prove a pipeline with these functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.ir.facts.capture.call import Inputs
from fxsplit.ir.facts.capture.output_kinds import MEAN, ROWS, OutputKind
from fxsplit.runtime.loss.loss import find_reduction, weigh_rows
from fxsplit.runtime.microbatches import divide_rows, join, split_target
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.nn.containers import to_plain_outputs
from fxsplit.torch_internals.tensors.differences import Difference, measure_difference, widen

ROUNDING = 1e-5
"""The smallest number that a difference is divided by, as a share of the largest tensor of the same kind.

The gradient of a bias before batch norm, for example, is zero: its computed value is only the rounding error of larger
numbers. Divided by itself, this error would seem large.
"""
AMPLIFIED = 10.0
"""How many times as much as a model with rounded weights a pipeline may differ.

Batch norm over two values, for example, turns 1e-16 into 1e-8.
"""
MOST = 1e-3
"""The largest difference that rounding can excuse. A gradient that is lost or doubled differs by far more."""


@dataclass(frozen=True)
class Differences:
    """The largest relative difference of each kind of value.

    `worst`: kind -> name of the tensor with that difference.
    """

    output: float
    gradient: float
    buffer: float
    worst: Mapping[str, str]

    @property
    def largest(self) -> float:
        """The largest of the three differences."""
        return max(self.output, self.gradient, self.buffer)

    def __str__(self) -> str:
        return f"output {self.output:.1e}, gradient {self.gradient:.1e}, buffer {self.buffer:.1e}"


@dataclass(frozen=True)
class Outcome:
    """The outputs, gradients and buffers after one training step, by name."""

    outputs: Mapping[str, Tensor | None]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Joined:
    """How to make the output and the loss of a batch from those of its microbatches.

    meanings: how to join each output (None: rows on the first dimension, and the mean of numbers).
    weights: the weights of the losses of microbatches (None: as the loss function states).
    first: join the outputs first and compute one loss of them, as in a training loop around the model.
    """

    meanings: Sequence[OutputKind] | None = None
    weights: Sequence[float] | None = None
    first: bool = False


def run_pipeline_step(
    pipe: Pipeline, args: Sequence[Any], target: Any = None, kwargs: Mapping[str, Any] | None = None
) -> Outcome:
    """Run one training step of a pipeline and return its outcome. Without a target, the loss is the model's own."""
    _, outputs = pipe.step(*args, target=target, return_outputs=True, **(kwargs or {}))
    return _read_outcome(pipe, outputs)


def run_pipeline_loop(
    pipe: Pipeline, args: Sequence[Any], loss_fn: Callable[..., Tensor], kwargs: Mapping[str, Any] | None = None
) -> Outcome:
    """Call a pipeline and run a loss of its joined outputs backward, as a training loop does. Return the outcome."""
    outputs = pipe(*args, **(kwargs or {}))
    loss_fn(outputs).backward()
    return _read_outcome(pipe, outputs)


def run_unsplit_step(
    model: nn.Module,
    args: Sequence[Any],
    target: Any,
    loss_fn: Callable[..., Tensor] | None,
    n_microbatches: int | Sequence[int],
    kwargs: Mapping[str, Any] | None = None,
    inputs: Inputs | None = None,
    joined: Joined | None = None,
) -> Outcome:
    """Run the unsplit model forward and backward on one microbatch after another, and return the outcome.

    loss_fn: the loss of outputs and target. None: run forward only.
    n_microbatches: their number, or a list with the rows of each.
    inputs: how the model is called (default: every tensor is cut on its first dimension).
    joined: how outputs and losses of microbatches make the output and loss of the batch.

    Without a target, `loss_fn` is called with only the outputs. Gradients are added to `.grad`.
    """
    joined = joined or Joined()
    inputs = inputs or Inputs.of(model, args, kwargs or {})[0]
    tensors = inputs.bind(args, kwargs or {}, None)
    batch = inputs.count_rows(tensors)
    rows = divide_rows(batch, n_microbatches) if isinstance(n_microbatches, int) else n_microbatches
    pieces_of = [spec.cut.split(t, rows) for t, spec in zip(tensors, inputs.specs, strict=True)]
    targets = [()] * len(rows) if target is None else [(t,) for t in split_target(target, rows, inputs)]
    outputs = []
    reduction = None if loss_fn is None else find_reduction(loss_fn)
    weights = weigh_rows(reduction, rows) if joined.weights is None else joined.weights
    for m, weight in enumerate(weights):
        call = inputs.make_call([column[m] for column in pieces_of])
        output = model(*call.args, **call.kwargs)
        # Weighted by rows, the losses of microbatches add up to the loss of the batch, as in the pipeline's step.
        if not joined.first:
            # A microbatch with a count of zero has no loss, and its weight is 0.
            if weight and loss_fn is not None:
                (loss_fn(output, *targets[m]) * weight).backward()
            output = pytree.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, to_plain_outputs(output))
        outputs.append(to_plain_outputs(output))
    whole = _join_outputs(outputs, rows, joined.meanings)
    if joined.first and loss_fn is not None:
        loss_fn(whole, *(() if target is None else (target,))).backward()
    return _read_outcome(model, whole)


def run_pipeline_forward(pipe: Pipeline, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Outcome:
    """Call a pipeline without gradients, and return the outcome."""
    with torch.no_grad():
        outputs = pipe(*args, **(kwargs or {}))
    return _read_outcome(pipe, outputs)


def _join_outputs(outputs: Sequence[Any], rows: Sequence[int], meanings: Sequence[OutputKind] | None) -> Any:
    """Return the outputs of all microbatches, joined to the outputs of one batch.

    `meanings` says how to join each tensor (None: rows on the first dimension, and the mean of numbers).
    """
    if meanings is None:
        meanings = [ROWS if t.ndim else MEAN for t in pytree.tree_leaves(outputs[0]) if isinstance(t, Tensor)]
    of = iter(meanings)
    # A constant among the outputs is the same for all microbatches.
    return pytree.tree_map(
        lambda *pieces: join(pieces, rows, next(of)) if isinstance(pieces[0], Tensor) else pieces[0], *outputs
    )


def limit_difference(tolerance: float, rounding: float, coarse: float = 0.0) -> float:
    """Return the largest difference that counts as equal.

    tolerance: a difference that is allowed in any case.
    rounding: the difference that rounded weights make in the unsplit model; several times as much is allowed.
    coarse: as in list_differences.
    """
    return max(tolerance, min(AMPLIFIED * rounding, _find_most(coarse)))


def _find_most(coarse: float) -> float:
    """Return the largest difference that rounding can excuse.

    bfloat16 rounds by more than MOST, but by less than a lost gradient differs. `coarse`: as in list_differences.
    """
    return max(MOST, 16.0 * coarse)


def list_differences(found: Outcome, expected: Outcome, coarse: float = 0.0) -> list[Difference]:
    """Return the difference of every output, gradient and buffer between two steps.

    coarse: the rounding of the coarsest dtype that the model computes in, if that is coarser than the compared dtype.
        Numbers that should cancel to zero in this dtype leave about this share of the largest tensor of their kind.
    """
    share = max(ROUNDING, min(1.0, AMPLIFIED * coarse / _find_most(coarse)))
    made = []
    for kind in ("outputs", "gradients", "buffers"):
        a, b = getattr(found, kind), getattr(expected, kind)
        sizes = [float(widen(t).abs().nan_to_num(posinf=0.0).max()) for t in b.values() if t is not None and t.numel()]
        # A tensor of zeros with rounding errors is compared on the scale of the largest tensor of its kind.
        scale = share * max(sizes, default=0.0)
        for name in {**a, **b}:
            # A name that only one side has is a lost gradient or buffer, which no tolerance excuses.
            missing = name not in a or name not in b
            value = math.inf if missing else measure_difference(a[name], b[name], scale)
            made.append(Difference(kind.removesuffix("s"), name, value))
    return made


def compare(found: Outcome, expected: Outcome) -> Differences:
    """Return the largest relative difference of each kind between two steps."""
    by_kind = itertools.groupby(list_differences(found, expected), lambda difference: difference.kind)
    worst = {kind: max(differences, key=lambda difference: difference.value) for kind, differences in by_kind}
    largest = {kind: worst[kind].value if kind in worst else 0.0 for kind in ("output", "gradient", "buffer")}
    return Differences(**largest, worst={kind: d.name for kind, d in worst.items()})


def _read_outcome(module: nn.Module, outputs: Any) -> Outcome:
    """Return the outputs, with the gradients and buffers that the step left in `module`."""
    leaves = enumerate(pytree.tree_leaves(to_plain_outputs(outputs)))
    return Outcome(
        outputs={str(i): t.detach() for i, t in leaves if isinstance(t, Tensor)},
        # Copies: the next step writes to gradients and buffers in place.
        gradients={name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()},
        buffers={name: b.clone() for name, b in module.named_buffers()},
    )
