"""Early sums: add a stage's gradients over pipelines right after the stage's last backward on this rank.

So the communication overlaps with the work of other stages and ranks.
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
    """Return, for each stage, the leaves whose gradients are complete after the stage's last backward on this rank.

    The list is empty for a stage with replicas, or with parameters that several stages share: their gradients are
    complete only at the end of the job.
    """
    held = Counter(id(p) for stage in program.stages.stages for p in stage.module.parameters())
    return [
        leaves if program.homes[number] == (me,) and all(held[id(leaf)] == 1 for leaf in leaves) else []
        for number, leaves in enumerate(program.list_trained())
    ]


class EarlySums:
    """Begins to add a stage's gradients over pipelines as soon as they are complete. Call it after each action.

    apart: for each stage, the leaves that may be added early (see `list_apart`).
    weight: the weight of this pipeline's loss.
    """

    def __init__(self, data_parallel: DataParallel, job: Job, apart: Sequence[Sequence[Tensor]], weight: float) -> None:
        self._data_parallel, self._sums = data_parallel, job.sums
        self._apart, self._weight = apart, weight
        self._last = find_last_backwards(job.schedule)

    def __call__(self, action: Action) -> None:
        """Begin to add the gradients of an action's stage, if the action was the stage's last backward."""
        stage = action.stage
        if self._last.get(stage) == action and self._apart[stage]:
            self._data_parallel.begin(self._sums[stage][0], self._apart[stage], self._weight)


def find_last_backwards(schedule: Schedule) -> dict[int, Action]:
    """Return, for each stage, the last action that adds to its gradients, on any replica."""
    return {a.stage: a for row in schedule.actions for a in row if a.op in (*GRADIENTS, WEIGHT_GRADIENT)}
