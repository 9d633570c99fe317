"""What the weights were at a forward: a backward in a later job may find others, and would be silently wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fxsplit.errors import ChangedWeightError
from fxsplit.runtime.program import Program
from fxsplit.torch_internals.interpret import count_writes, get_storage_id
from fxsplit.torch_internals.words import is_changed_tensor

ADVICE = "step the optimizer, and write to weights or load them, after backward()"

Mark = tuple[int, int | None, int]
"""A weight by its identity, how often it had been written to, and its memory, since `.data` may be replaced."""


class WeightsThen:
    """Every stage's weights at a forward of so many microbatches."""

    def __init__(self, program: Program, n_microbatches: int) -> None:
        self._program = program
        self._marks = [_mark_all(held) for held in program.weight_dicts]
        # Another object may have the identity of one that is gone.
        self._alive = [w for dicts in program.weight_dicts for held in dicts for w in held.values()]
        counts = range(n_microbatches)
        self._recomputing = [
            stage.index
            for stage in program.stages.stages
            if any(program.recomputes(stage.index, m, n_microbatches) for m in counts)
        ]

    def check(self) -> None:
        """Raise ChangedWeightError for a change of a weight with which a stage is to compute again."""
        for stage in self._recomputing:
            path = self._find_changed(stage)
            if path is not None:
                raise ChangedWeightError(
                    f"{path!r} has changed since the pipeline's forward, and stage {stage} is to run again with it "
                    f"before its backward (recompute={self._program.recompute!r}): {ADVICE}"
                )

    def explain(self, error: Exception) -> None:
        """Raise ChangedWeightError in place of torch's own error for a weight that it has kept and that has changed."""
        if not is_changed_tensor(error):
            return
        # Buffers that autograd has kept are copies.
        modules = [stage.module for stage in self._program.stages.stages]
        known = {mark for marks in self._marks for mark in marks}
        changed = dict.fromkeys(p for m in modules for p, w in m.named_parameters() if _mark(w) not in known)
        if changed:
            more = f" and {len(changed) - 1} more have" if len(changed) > 1 else " has"
            raise ChangedWeightError(
                f"{next(iter(changed))!r}{more} changed since the pipeline's forward, and its backward needs them"
                f" as they were: {ADVICE}"
            ) from error

    def _find_changed(self, stage: int) -> str | None:
        """Return the path of a weight of a stage that is another now; not one that the stage's own forward writes."""
        marks = self._marks[stage]
        if _mark_all(self._program.weight_dicts[stage]) == marks:
            return None
        module, known = self._program.stages[stage].module, set(marks)
        named = (*module.named_parameters(), *module.named_buffers())
        written = self._program.written[stage].names
        return next((path for path, w in named if path not in written and _mark(w) not in known), None)


def _mark_all(dicts: Sequence[Mapping[str, Tensor | None]]) -> list[Mark]:
    """Return what tells whether any weight has changed."""
    return [_mark(weight) for held in dicts for weight in held.values() if weight is not None]


def _mark(weight: Tensor) -> Mark:
    """Return what tells whether a weight has changed."""
    return id(weight), count_writes(weight), get_storage_id(weight)
