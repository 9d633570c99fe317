"""Remember the meaning of the loss for each program of a pipeline.

The *meaning* of a loss says how the loss of a batch follows from the losses of its microbatches: as a sum, as a mean
over rows, or as a mean over a count of labels.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from fxsplit.frontend.meanings.losses import find_loss_counts
from fxsplit.frontend.watch.calls import CallWatch
from fxsplit.runtime.loss.loss import LossFn, find_own_meaning, find_reduction, take_model_loss
from fxsplit.runtime.loss.meaning import LossMeaning
from fxsplit.runtime.program import Batch, Program


class LossMeanings:
    """Finds out, once for each program, how the loss of a batch follows from the losses of its microbatches.

    loss_fn: the loss function; None for the loss that the model itself returns.
    side_by_side: whether other pipelines have other rows of the batch.
    """

    def __init__(self, loss_fn: LossFn | None, *, side_by_side: bool = False) -> None:
        self._loss_fn = loss_fn
        self._side_by_side = side_by_side
        self._known: WeakKeyDictionary[Program, LossMeaning] = WeakKeyDictionary()

    def find(self, batch: Batch) -> LossMeaning:
        """Return how the loss of a step follows from its microbatches. Raises InputError if it does not follow."""
        program = batch.program
        if self._loss_fn is None:
            return LossMeaning(take_model_loss, find_own_meaning(program, len(batch.rows)).kind, looks=False)
        if len(batch.rows) == 1 and not self._side_by_side:  # any loss is right for a batch that stays whole
            return LossMeaning(self._loss_fn, find_reduction(self._loss_fn), looks=False)
        # The meaning may differ for the outputs of another program, or after `loss_fn.reduction` has changed.
        stated = find_reduction(self._loss_fn)
        meaning = self._known.get(program)
        if meaning is None or meaning.stated != stated:
            meaning = self._known[program] = LossMeaning(
                self._loss_fn,
                stated,
                watch=CallWatch,
                find_counts=find_loss_counts,
                side_by_side=self._side_by_side,
            )
        meaning.begin_step()
        return meaning
