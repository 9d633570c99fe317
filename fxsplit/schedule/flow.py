"""Flow: what every action waits for."""

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
"""An action, and the boundary (before which stage) that its result crosses between devices, if it does."""


def plain(action: Action) -> Action:
    """Return an action by what it does, whichever weights it uses."""
    return action._replace(version=0)


def needs(schedule: Schedule, action: Action) -> list[Need]:
    """Return the (plain) actions that must be done before `action` can start."""
    stage, op, m = action.stage, action.op, action.microbatch
    replica = schedule.replica_of.get
    if op == FORWARD:
        return [_value(schedule, stage, m)] if stage > 0 else []
    if op in GRADIENTS:
        found: list[Need] = [(Action(stage, FORWARD, m, action.replica), None)]
        return [*found, _gradient(schedule, stage, m)] if stage + 1 < schedule.n_stages else found
    if op == WEIGHT_GRADIENT:
        return [(schedule.gradient(stage, m), None)]
    if op == SEND_F:
        return [(Action(stage, FORWARD, m, action.replica), None)]
    if op == RECV_F:
        return [(Action(stage - 1, SEND_F, m, replica((stage - 1, m), 0)), stage)]
    if op == SEND_B:
        return [(schedule.gradient(stage, m), None)]
    if op == RECV_B:
        return [(Action(stage + 1, SEND_B, m, replica((stage + 1, m), 0)), stage + 1)]
    own = schedule.releases.get(stage, [])
    if op == REDUCE:  # the replicas sum together, once all have their own
        return [(plain(a), None) for a in own]
    assert op == STEP
    return [(plain(a), None) for a in own if a.replica == action.replica and a.microbatch <= m]


def _value(schedule: Schedule, stage: int, m: int) -> Need:
    """Return what a stage's forward reads: the one before's outputs, or their arrival."""
    crosses = schedule.device_of(stage - 1, m) != schedule.device_of(stage, m)
    if crosses and schedule.transfers:
        return Action(stage, RECV_F, m, schedule.replica_of.get((stage, m), 0)), None
    made = Action(stage - 1, FORWARD, m, schedule.replica_of.get((stage - 1, m), 0))
    return made, stage if crosses else None


def _gradient(schedule: Schedule, stage: int, m: int) -> Need:
    """Return what a stage's backward starts from: the next one's input gradients, or their arrival."""
    crosses = schedule.device_of(stage + 1, m) != schedule.device_of(stage, m)
    if crosses and schedule.transfers:
        return Action(stage, RECV_B, m, schedule.replica_of.get((stage, m), 0)), None
    return schedule.gradient(stage + 1, m), stage + 1 if crosses else None
