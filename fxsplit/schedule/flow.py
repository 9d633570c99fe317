"""Flow: which actions must be done before an action can start, and which of them cross between devices.

The verifier and the simulator both ask this file. For example `1F3` needs `0F3`; where stages 0 and 1 live on different
devices, its result crosses boundary 1, which is the cut before stage 1.
"""

from __future__ import annotations

from fxsplit.schedule.action import (
    FORWARD,
    GRADIENTS,
    RECV_B,
    RECV_F,
    REDUCE,
    SEND_B,
    SEND_F,
    STEP,
    WEIGHT_GRADIENT,
    Action,
)
from fxsplit.schedule.schedule import Schedule

Need = tuple[Action, int | None]
"""An action, and the boundary (the stage behind the cut) that its result crosses between devices, or None."""


def drop_version(action: Action) -> Action:
    """Return an action without the version of the weights that it uses.

    Needs name actions by what they do: who waits for a forward does not know which weights the forward used.
    """
    return action._replace(version=0)


def find_needs(schedule: Schedule, action: Action) -> list[Need]:
    """Return the actions, without versions, that must be done before `action` can start."""
    stage, op, m = action.stage, action.op, action.microbatch
    replica = schedule.replica_of.get
    if op == FORWARD:
        return [_find_value(schedule, stage, m)] if stage > 0 else []
    if op in GRADIENTS:
        # The backward of the last stage starts from the loss, which its own forward makes.
        found: list[Need] = [(Action(stage, FORWARD, m, action.replica), None)]
        return [*found, _find_gradient(schedule, stage, m)] if stage + 1 < schedule.n_stages else found
    # A weight gradient goes on where the input gradient of its backward has stopped.
    if op == WEIGHT_GRADIENT:
        return [(schedule.gradient(stage, m), None)]
    if op == SEND_F:
        return [(Action(stage, FORWARD, m, action.replica), None)]
    # A transfer's time is on the receiver's side, so a receive, and no send, crosses a boundary.
    if op == RECV_F:
        return [(Action(stage - 1, SEND_F, m, replica((stage - 1, m), 0)), stage)]
    if op == SEND_B:
        return [(schedule.gradient(stage, m), None)]
    if op == RECV_B:
        return [(Action(stage + 1, SEND_B, m, replica((stage + 1, m), 0)), stage + 1)]
    own = schedule.releases.get(stage, [])
    if op == REDUCE:  # the replicas of a stage sum together, so each waits for the gradients of all of them
        return [(drop_version(a), None) for a in own]
    # A step uses the gradients of its own replica, of all microbatches up to its own.
    assert op == STEP
    return [(drop_version(a), None) for a in own if a.replica == action.replica and a.microbatch <= m]


def _find_value(schedule: Schedule, stage: int, m: int) -> Need:
    """Return what the forward of a stage reads: the outputs of the stage before, or their arrival."""
    crosses = schedule.device_of(stage - 1, m) != schedule.device_of(stage, m)
    if crosses and schedule.transfers:
        return Action(stage, RECV_F, m, schedule.replica_of.get((stage, m), 0)), None
    made = Action(stage - 1, FORWARD, m, schedule.replica_of.get((stage - 1, m), 0))
    return made, stage if crosses else None


def _find_gradient(schedule: Schedule, stage: int, m: int) -> Need:
    """Return what the backward of a stage starts from: the input gradients of the next stage, or their arrival."""
    crosses = schedule.device_of(stage + 1, m) != schedule.device_of(stage, m)
    if crosses and schedule.transfers:
        return Action(stage, RECV_B, m, schedule.replica_of.get((stage, m), 0)), None
    return schedule.gradient(stage + 1, m), stage + 1 if crosses else None
