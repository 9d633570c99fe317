"""Run one step of the unsplit model, and of a pipeline, on one batch, so that verify() can compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from fxsplit.api.pipeline.loss_meanings import LossMeanings
from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.api.verify.compare import (
    Joined,
    Outcome,
    limit_difference,
    list_differences,
    run_pipeline_forward,
    run_pipeline_loop,
    run_pipeline_step,
    run_unsplit_step,
)
from fxsplit.api.verify.loss import Objective, list_tensors
from fxsplit.api.verify.ranks import Ranks
from fxsplit.ir.facts.capture.call import Call
from fxsplit.ir.facts.capture.effects import CallEffects
from fxsplit.ir.facts.capture.output_kinds import OutputKind
from fxsplit.runtime.backends.backend import JobRequest
from fxsplit.runtime.loss.loss import BatchLoss, find_own_meaning, find_weights, sum_squares, take_model_loss
from fxsplit.runtime.microbatches import Targets, split_target
from fxsplit.runtime.program import Batch
from fxsplit.runtime.ranks.gradients.batch_share import (
    BatchShare,
    LossReduction,
    find_batch_share,
    find_own_batch_share,
)
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fake.snapshot import Snapshot
from fxsplit.torch_internals.nn.copies import copy_module
from fxsplit.torch_internals.nn.expectations import normalise_rows_alone

Key = tuple[str, str]
"""The kind (output, gradient or buffer) and the name of a compared tensor."""


@dataclass(frozen=True, eq=False)
class Trial:
    """One call of a model that is run in several ways, and how its loss and outputs follow from its microbatches.

    batch: the call as the pipeline runs it. meanings: how each output is joined from those of microbatches. objective:
    the loss. weight: the weight of this pipeline's loss among pipelines side by side.
    """

    call: Call
    batch: Batch
    meanings: Sequence[OutputKind]
    objective: Objective
    ranks: Ranks
    weight: float = 1.0

    @classmethod
    def of(cls, call: Call, batch: Batch, split: Pipeline, objective: Objective, ranks: Ranks) -> Trial:
        """Return the trial of a call; the pipeline `split` has made `batch` from this call.

        Raises InputError unless the target has one row for each row of the batch.
        """
        if objective.takes_target:
            split_target(objective.target, batch.rows, batch.program.inputs)
        made = cls(call, batch, split.traced[CallEffects].meanings, objective, ranks)
        if not made.trains:
            return made
        return replace(made, weight=ranks.weigh(split, made._find_batch_share))

    @property
    def trains(self) -> bool:
        """Whether gradients of the pipeline reach the model. If not, only the outputs of a call can be compared."""
        return self.batch.program.detached is None

    @property
    def loss(self) -> str:
        """The loss in words; empty if only the outputs of a call are compared."""
        return self.objective.text if self.trains else ""

    def _find_batch_share(self) -> BatchShare:
        """Return what share this pipeline's batch has in the loss of all pipelines side by side."""
        batch = self.batch
        found = BatchShare(
            sum(batch.rows), len(batch.rows), LossReduction.MEAN if self.joins_first else LossReduction.SUM
        )
        if self.objective.loss_fn is None:
            return find_own_batch_share(batch, found)
        if not self.objective.takes_target:
            return found
        request = JobRequest("step", batch, batch.program.schedule(len(batch.rows)), self._batch_loss)
        return find_batch_share(request, has_loss=True, ended=True)

    @cached_property
    def _batch_loss(self) -> BatchLoss:
        """The pipeline's own loss for this batch.

        The unsplit model's outputs have shown how this loss follows from microbatches.
        """
        objective, batch = self.objective, self.batch
        assert objective.loss_fn is not None, "a target was given"
        leaves = list_tensors(objective.outputs)
        meaning = LossMeanings(objective.loss_fn, side_by_side=True).find(batch)
        meaning.look_at(batch.program, leaves, (objective.place(objective.target, leaves),), sum(batch.rows))
        targets = Targets(split_target(objective.target, batch.rows, batch.program.inputs), objective.target)
        return BatchLoss(objective.loss_fn, targets, batch.rows, meaning=meaning)

    @cached_property
    def _loss_weights(self) -> list[float]:
        """The weights with which the losses of the microbatches add up to the pipeline's own loss of the batch."""
        loss = self._batch_loss
        targets = Targets(loss.given_targets, loss.target)
        weights = find_weights(self.batch, targets, loss.meaning)(0, len(self.batch.rows), torch.device("cpu"))
        return [float(weight) for weight in weights]

    @cached_property
    def joins_first(self) -> bool:
        """Whether outputs are joined before the loss: squares of means and of sums do not add up over microbatches."""
        summed = self.objective.loss_fn is sum_squares
        return summed and any(meaning.kind != "rows" for meaning in self.meanings)

    def run(self, model: nn.Module, rows: Sequence[int], *, cuts_loss: bool = False) -> Outcome:
        """Run a step of the unsplit model on microbatches of `rows` rows. Return the outcome, summed over pipelines.

        cuts_loss: compute the pipeline's own loss for each microbatch, as the pipeline does. Otherwise it is computed
            once, from the outputs of all microbatches, and needs no weights.
        """
        args, kwargs = clone_call(self.call)
        objective, batch = self.objective, self.batch._replace(rows=rows)
        meanings = [replace(m, weights=[float(w) for w in batch.weigh(m)]) for m in self.meanings]
        if not self.trains:
            with torch.no_grad():
                found = run_unsplit_step(model, args, None, None, rows, kwargs, batch.program.inputs, Joined(meanings))
            return replace(found, gradients={})
        weights, target = None, None
        loss_fn: Callable[..., Tensor] = objective.loss_fn or take_model_loss
        if objective.loss_fn is None:
            weights = [float(w) for w in batch.weigh(find_own_meaning(batch.program, len(rows)))]
        elif objective.takes_target:
            loss_fn, target = partial(objective.compute, batch.program), objective.clone_target()
            weights = self._loss_weights if cuts_loss else None
        joined = Joined(meanings, weights, self.joins_first or (objective.takes_target and not cuts_loss))
        found = run_unsplit_step(model, args, target, loss_fn, rows, kwargs, batch.program.inputs, joined)
        return self.ranks.add(model, found, self.weight)

    def run_graph(self, split: Pipeline, model: nn.Module) -> Outcome:
        """Run a step of the captured graph, unsplit, with a copy of the weights of `model`. Return the outcome.

        The graph does the arithmetic of the pipeline in one piece. The outcome has only the tensors that `split` has on
        this rank.
        """
        copied = copy_module(model)
        pairs = ((split.model.modules(), copied.modules()), (split.model.parameters(), copied.parameters()),
                 (split.model.buffers(), copied.buffers()))  # fmt: skip
        memo = {id(one): other for own, others in pairs for one, other in zip(own, others, strict=True)}
        gm = copy_module(split.traced.gm, memo)
        inputs = self.batch.program.inputs
        copied.forward = lambda *args, **kwargs: gm(*inputs.bind(args, kwargs, None))
        return self.ranks.keep_own(self.run(copied, self.batch.rows, cuts_loss=True), split)

    def run_pipeline(self, split: Pipeline) -> Outcome:
        """Run a step of the pipeline, and return the outcome on this rank."""
        args, kwargs = clone_call(self.call)
        if not self.trains:
            found = replace(run_pipeline_forward(split, args, kwargs), gradients={})
        elif self.joins_first:
            found = run_pipeline_loop(split, args, sum_squares, kwargs)
        else:
            objective = self.objective
            # A loss of outputs only is called with an empty target.
            nothing = None if objective.loss_fn is None else ()
            target = objective.clone_target() if objective.takes_target else nothing
            found = run_pipeline_step(split, args, target, kwargs)
        return self.ranks.keep_own(found, split)


class Neutral:
    """Decides whether a value that differs between microbatches and the whole batch does so for a reason in the model.

    Such reasons are batch norm, buffers that every call writes, and counts that a loss divides by. This class runs a
    copy of the model, as it was before a step, without the first two: batch norms normalise each row by itself, and
    buffers are reset before every microbatch. A difference that remains is an error.
    """

    def __init__(self, trial: Trial, model: nn.Module, tolerance: float) -> None:
        self._trial = trial
        self.model = copy_module(model)
        self._tolerance = tolerance

    def find_apart(
        self, by_pieces: Outcome, by_whole: Outcome, rounding: Mapping[Key, float], coarse: float
    ) -> dict[Key, str]:
        """Return the tensors that differ between microbatches and the whole batch, each as "nature" or "wrong".

        "nature": for a reason in the model. "wrong": by an error.
        rounding: the rounding error of each tensor. It counts only if the model computes in a coarser dtype.
        coarse: the rounding of that dtype; 0.0 if there is none.
        """
        excused = rounding if coarse else {}
        apart = self._list_apart(by_pieces, by_whole, excused, coarse)
        # The compile has warned of an output that is averaged by other counts.
        counted = [str(i) for i, meaning in enumerate(self._trial.meanings) if meaning.kind == "counted"]
        # Ranks run the copy together, even if one of them finds no difference in its own batch.
        if not self._trial.ranks.any(bool(apart)) or (counted and self._trial.objective.loss_fn is None):
            return dict.fromkeys(apart, "nature")
        rows = self._trial.batch.rows
        with normalise_rows_alone():
            wrong = self._list_apart(self._run(rows), self._run([sum(rows)]), excused, coarse)
        return {key: "wrong" if key in wrong and key[0] != "buffer" else "nature" for key in apart}

    def _run(self, rows: Sequence[int]) -> Outcome:
        """Run a step of a copy of the model, with its buffers reset before every microbatch. Return the outcome."""
        model = copy_module(self.model)
        before = Snapshot(model.buffers())
        model.register_forward_pre_hook(lambda *_: before.restore())
        return self._trial.run(model, rows)

    def _list_apart(self, a: Outcome, b: Outcome, rounding: Mapping[Key, float], coarse: float) -> list[Key]:
        """Return the tensors that differ by more than rounding, by kind and name."""
        found = {(d.kind, d.name): d.value for d in list_differences(a, b, coarse)}
        return [k for k, v in found.items() if v > limit_difference(self._tolerance, rounding.get(k, 0.0), coarse)]


def clone_call(call: Call) -> Call:
    """Return a call with copies of its tensors: a model may write to its arguments."""
    cloned: Call = pytree.tree_map_only(Tensor, torch.clone, call)
    return cloned
