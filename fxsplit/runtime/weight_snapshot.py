"""Detect changes of weights or inputs between a forward and its backward. Such changes would make gradients wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fxsplit.errors import BackwardError, ChangedWeightError
from fxsplit.runtime.program import Batch
from fxsplit.torch_internals.error_texts import is_changed_tensor
from fxsplit.torch_internals.fx.interpret import count_writes, get_storage_id

ADVICE = "step the optimizer, and write to weights or load them, after backward()"
INPUT_ADVICE = "write to it after backward(), or call the pipeline with a clone"

Mark = tuple[int, int | None, int]
"""A tensor's id(), torch's count of writes to the tensor, and its storage. Assigning `.data` changes the storage."""


class WeightSnapshot:
    """The state of every stage's weights, and of the inputs, at the forward of a batch.

    The backward compares with it.
    """

    def __init__(self, batch: Batch) -> None:
        program, tensors, rows, *_ = batch
        self._program = program
        self._marks = [_mark_all(held) for held in program.weight_dicts]
        # Keep the weights alive: a new object could have the id of one that is gone.
        self._alive = [w for dicts in program.weight_dicts for held in dicts for w in held.values()]
        self._trained = program.list_trained()
        self._inputs = [(spec.name, t, _mark(t)) for spec, t in zip(program.inputs.specs, tensors, strict=True)]
        self._recomputing = {stage for stage, _ in program.find_recomputed(len(rows))}

    def check(self) -> None:
        """Raise an error if weights or inputs have changed so that a stage cannot run its forward again.

        Raises ChangedWeightError for a changed weight of such a stage, and for a weight that was frozen since. Raises
        BackwardError for a changed input of stage 0.
        """
        frozen = next((leaf for part in self._trained for leaf in part if not leaf.requires_grad), None)
        if frozen is not None:
            raise ChangedWeightError(
                f"{self._find_path(frozen)!r} wanted a gradient in the pipeline's forward, and wants none now: set "
                "requires_grad before the forward, or after backward()"
            )
        if 0 in self._recomputing and (name := self._find_written(read_again=True)):
            raise BackwardError(
                f"argument {name!r} has been written to since the pipeline's forward, and stage 0 is to run again with "
                f"it before its backward (recompute={self._program.recompute!r}): {INPUT_ADVICE}"
            )
        for stage in self._recomputing:
            path = self._find_changed(stage)
            if path is not None:
                raise ChangedWeightError(
                    f"{path!r} has changed since the pipeline's forward, and stage {stage} is to run again with it "
                    f"before its backward (recompute={self._program.recompute!r}): {ADVICE}"
                )

    def explain(self, error: Exception) -> None:
        """Raise a clear error in place of torch's `error` about a tensor that autograd saved and that was changed.

        Raises ChangedWeightError for a weight, and BackwardError for an input. Does nothing for other errors.
        """
        if not is_changed_tensor(error):
            return
        # Buffers need no check: autograd has saved copies of them.
        modules = [stage.module for stage in self._program.stages.stages]
        known = {mark for marks in self._marks for mark in marks}
        changed = dict.fromkeys(p for m in modules for p, w in m.named_parameters() if _mark(w) not in known)
        if changed:
            more = f" and {len(changed) - 1} more have" if len(changed) > 1 else " has"
            raise ChangedWeightError(
                f"{next(iter(changed))!r}{more} changed since the pipeline's forward, and its backward needs them"
                f" as they were: {ADVICE}"
            ) from error
        if name := self._find_written(read_again=False):
            raise BackwardError(
                f"argument {name!r} has been written to since the pipeline's forward, and its backward needs it as it "
                f"was: {INPUT_ADVICE}"
            ) from error

    def _find_path(self, weight: Tensor) -> str:
        """Return the path of a weight in the model, or a text that says that the weight was replaced."""
        named = (pair for stage in self._program.stages.stages for pair in stage.module.named_parameters())
        return next((path for path, other in named if other is weight), "a parameter that was replaced")

    def _find_written(self, *, read_again: bool) -> str | None:
        """Return the name of an input that has changed since the forward, or None.

        read_again: look only at the inputs that stage 0 reads again to run its forward, and of which it has no copies.
        """
        # If the graph writes to its inputs, or stage 0 is on another device, stage 0 keeps copies.
        home = [self._program.devices[d] for d in self._program.homes[0]]
        kept = [one for one in self._inputs if not self._program.writes_inputs and one[1].device in home]
        return next((name for name, t, mark in (kept if read_again else self._inputs) if _mark(t) != mark), None)

    def _find_changed(self, stage: int) -> str | None:
        """Return the path of a changed weight of a stage, or None.

        Weights that the stage's own forward writes do not count.
        """
        marks = self._marks[stage]
        if _mark_all(self._program.weight_dicts[stage]) == marks:
            return None
        module, known = self._program.stages[stage].module, set(marks)
        named = (*module.named_parameters(), *module.named_buffers())
        written = self._program.written[stage].names
        return next((path for path, w in named if path not in written and _mark(w) not in known), None)


def _mark_all(dicts: Sequence[Mapping[str, Tensor | None]]) -> list[Mark]:
    """Return the marks of all weights, to detect later whether a weight has changed."""
    return [_mark(weight) for held in dicts for weight in held.values() if weight is not None]


def _mark(weight: Tensor) -> Mark:
    """Return the mark of one tensor, to detect later whether the tensor has changed."""
    return id(weight), count_writes(weight), get_storage_id(weight)
