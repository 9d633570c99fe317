"""Early sums: the gradients of a stage are added over pipelines as soon as its last backward here is over.

They are under way while other stages and other ranks still run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from fxsplit.runtime.job.job import Job
from fxsplit.runtime.program import Program
from fxsplit.runtime.ranks.gradients.data_parallel import DataParallel
from fxsplit.schedule.action import GRADIENTS, WEIGHT_GRADIENT, Action
from fxsplit.schedule.schedule import Schedule


def list_apart(program: Program, me: int) -> list[list[Tensor]]:
    """Return, for each stage, its leaves if nothing but the stage on this rank adds to their gradients, or none.

    Of a stage with replicas, and of one whose parameters other stages have too, sums are complete at the end alone.
    """
    held = Counter(id(p) for stage in program.stages.stages for p in stage.module.parameters())
    return [
        leaves if program.homes[number] == (me,) and all(held[id(leaf)] == 1 for leaf in leaves) else []
        for number, leaves in enumerate(program.list_trained())
    ]


class EarlySums:
    """Begins to add gradients of a job whose `weight` is known; called after each action of this rank."""

    def __init__(self, data_parallel: DataParallel, job: Job, apart: Sequence[Sequence[Tensor]], weight: float) -> None:
        self._data_parallel, self._sums = data_parallel, job.sums
        self._apart, self._weight = apart, weight
        self._last = find_last_backwards(job.schedule)

    def __call__(self, action: Action) -> None:
        """Begin with the stage of an action, if that was its last backward."""
        stage = action.stage
        if self._last.get(stage) == action and self._apart[stage]:
            self._data_parallel.begin(self._sums[stage][0], self._apart[stage], self._weight)


def find_last_backwards(schedule: Schedule) -> dict[int, Action]:
    """Return, for each stage, the last action that adds to its gradients; of one with replicas, any replica's."""
    return {a.stage: a for row in schedule.actions for a in row if a.op in (*GRADIENTS, WEIGHT_GRADIENT)}
