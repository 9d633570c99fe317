"""Trials: one step of the unsplit model, and of a pipeline, on one batch, to be compared by verify()."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fxsplit.api.compare import (
    Joined,
    Outcome,
    limit_difference,
    list_differences,
    run_pipeline_loop,
    run_pipeline_step,
    run_unsplit_step,
)
from fxsplit.api.pipeline import Pipeline
from fxsplit.api.verify_ranks import Ranks
from fxsplit.ir.facts.call import Call
from fxsplit.ir.facts.effects import CallEffects
from fxsplit.ir.facts.meanings import Meaning
from fxsplit.runtime.loss import LossFn, find_own_meaning, sum_squares, take_model_loss
from fxsplit.runtime.program import Batch
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.copies import copy_module
from fxsplit.torch_internals.expectations import normalise_rows_alone
from fxsplit.torch_internals.fake_weights import Snapshot

Key = tuple[str, str]
"""The kind and name of what is compared."""


@dataclass(frozen=True, eq=False)
class Trial:
    """One call of a model, and how its loss and outputs follow from those of microbatches.

    `loss_fn` is None for the model's own loss. `weight` is what the loss of this pipeline weighs beside others.
    """

    call: Call
    batch: Batch
    meanings: Sequence[Meaning]
    loss_fn: LossFn | None
    ranks: Ranks
    weight: float = 1.0

    @classmethod
    def of(cls, call: Call, batch: Batch, split: Pipeline, loss_fn: LossFn | None, ranks: Ranks) -> Trial:
        """Return the trial of a call, of which `split` has made a batch."""
        made = cls(call, batch, split.traced[CallEffects].meanings, loss_fn, ranks)
        weight = ranks.weigh(split, batch, own_loss=loss_fn is None, joins_first=made.joins_first)
        return replace(made, weight=weight)

    @cached_property
    def joins_first(self) -> bool:
        """Whether the loss is of joined outputs: the squares of means and sums do not add up over microbatches."""
        return self.loss_fn is not None and any(meaning.kind != "rows" for meaning in self.meanings)

    def run(self, model: nn.Module, rows: Sequence[int]) -> Outcome:
        """Return what a step of the unsplit model leaves, on microbatches of so many rows; gradients of all ranks."""
        args, kwargs = clone_call(self.call)
        target = () if self.loss_fn else None
        loss_fn, how = self.loss_fn or take_model_loss, self.batch.program.inputs
        batch = self.batch._replace(rows=rows)
        meanings = [replace(m, weights=[float(w) for w in batch.weigh(m)]) for m in self.meanings]
        own = find_own_meaning(batch.program, len(rows)) if self.loss_fn is None else None
        weights = None if own is None else [float(w) for w in batch.weigh(own)]
        joined = Joined(meanings, weights, self.joins_first)
        found = run_unsplit_step(model, args, target, loss_fn, rows, kwargs, how, joined)
        return self.ranks.add(model, found, self.weight)

    def run_pipeline(self, split: Pipeline) -> Outcome:
        """Return what a step of the pipeline leaves on this rank."""
        args, kwargs = clone_call(self.call)
        if self.joins_first:
            found = run_pipeline_loop(split, args, sum_squares, kwargs)
        else:
            found = run_pipeline_step(split, args, () if self.loss_fn else None, kwargs)
        return self.ranks.keep_own(found, split)


class Neutral:
    """Tells what microbatches change by nature: batch norm, buffers that calls write, and means by other counts.

    A copy of the model, as it is before a step, is run with batch norms that normalise each row by itself, and buffers
    that every microbatch finds as they were. What still differs between microbatches and the whole batch is a fault.
    """

    def __init__(self, trial: Trial, model: nn.Module, tolerance: float) -> None:
        self._trial = trial
        self._model = copy_module(model)
        self._tolerance = tolerance

    def find_apart(
        self, by_pieces: Outcome, by_whole: Outcome, rounding: Mapping[Key, float], coarse: float
    ) -> dict[Key, str]:
        """Return the tensors that differ between microbatches and the whole batch, each as "nature" or "wrong".

        rounding: the difference that rounding makes, by name. It counts only if the model computes in a coarser dtype.
        coarse: the rounding of that dtype, 0.0 without one.
        """
        excused = rounding if coarse else {}
        apart = self._list_apart(by_pieces, by_whole, excused, coarse)
        # An output that is averaged by other counts is named when the model is compiled.
        counted = [str(i) for i, meaning in enumerate(self._trial.meanings) if meaning.kind == "counted"]
        # Ranks run it together, and one of them may find nothing in its batch.
        if not self._trial.ranks.any(bool(apart)) or (counted and self._trial.loss_fn is None):
            return dict.fromkeys(apart, "nature")
        rows = self._trial.batch.rows
        with normalise_rows_alone():
            wrong = self._list_apart(self._run(rows), self._run([sum(rows)]), excused, coarse)
        return {key: "wrong" if key in wrong and key[0] != "buffer" else "nature" for key in apart}

    def _run(self, rows: Sequence[int]) -> Outcome:
        """Return what a step leaves of a copy whose buffers are as before for every microbatch."""
        model = copy_module(self._model)
        before = Snapshot(model.buffers())
        model.register_forward_pre_hook(lambda *_: before.restore())
        return self._trial.run(model, rows)

    def _list_apart(self, a: Outcome, b: Outcome, rounding: Mapping[Key, float], coarse: float) -> list[Key]:
        """Return the names of tensors that differ by more than rounding."""
        found = {(d.kind, d.name): d.value for d in list_differences(a, b, coarse)}
        return [k for k, v in found.items() if v > limit_difference(self._tolerance, rounding.get(k, 0.0), coarse)]


def clone_call(call: Call) -> Call:
    """Return a call with copies of its tensors, which a model may write to."""
    cloned: Call = pytree.tree_map_only(Tensor, torch.clone, call)
    return cloned
