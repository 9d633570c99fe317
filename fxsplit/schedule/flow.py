"""Flow: which actions must be done before an action can start, and which of their results cross between devices.

The verifier and the simulator both ask this file. For example `1F3` needs `0F3`; where stages 0 and 1 live on different
devices, its result crosses boundary 1, which is the cut before stage 1. Generators make schedules without these
*transfers*. torch's runtime wants them written out, as what one device sends and another one receives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fxsplit.schedule.action import (
    FORWARD,
    GRADIENTS,
    RECV_B,
    RECV_F,
    REDUCE,
    SEND_B,
    SEND_F,
    STEP,
    TRANSFERS,
    WEIGHT_GRADIENT,
    Action,
)
from fxsplit.schedule.schedule import Schedule

Need = tuple[Action, int | None]
"""An action, and the boundary (the stage behind the cut) that its result crosses between devices, or None."""


class Message(NamedTuple):
    """What one device sends to another: the value that a forward makes, or the gradient that a backward makes.

    `made` is the action that sends it, `boundary` the stage behind the cut that it crosses.
    """

    made: Action
    boundary: int
    source: int
    destination: int


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
        if stage == 0:
            return []
        made = Action(stage - 1, FORWARD, m, replica((stage - 1, m), 0))
        return [_find_arrival(schedule, made, stage, RECV_F)]
    if op in GRADIENTS:
        # The backward of the last stage starts from the loss, which its own forward makes.
        found: list[Need] = [(Action(stage, FORWARD, m, action.replica), None)]
        if stage + 1 == schedule.n_stages:
            return found
        return [*found, _find_arrival(schedule, schedule.gradient(stage + 1, m), stage, RECV_B)]
    # A weight gradient goes on where the input gradient of its backward has stopped, which also makes what is sent.
    if op in (WEIGHT_GRADIENT, SEND_B):
        return [(schedule.gradient(stage, m), None)]
    if op == SEND_F:
        return [(Action(stage, FORWARD, m, action.replica), None)]
    # A send takes its device no time: what it sends is under way, and its receive waits for that.
    if op == RECV_F:
        return [(Action(stage - 1, SEND_F, m, replica((stage - 1, m), 0)), stage)]
    if op == RECV_B:
        return [(Action(stage + 1, SEND_B, m, replica((stage + 1, m), 0)), stage + 1)]
    own = schedule.releases.get(stage, [])
    if op == REDUCE:  # the replicas of a stage sum together, so each waits for the gradients of all of them
        return [(drop_version(a), None) for a in own]
    # A step uses the gradients of its own replica, of all microbatches up to its own.
    assert op == STEP
    return [(drop_version(a), None) for a in own if a.replica == action.replica and a.microbatch <= m]


def find_message(schedule: Schedule, action: Action) -> Message | None:
    """Return what crosses to another device as soon as `action` is done, or None where nothing does."""
    stage, m = action.stage, action.microbatch
    sends = (SEND_F, SEND_B) if schedule.transfers else (FORWARD, *GRADIENTS)
    if action.op not in sends:
        return None
    other = stage + 1 if action.op in (FORWARD, SEND_F) else stage - 1
    if not 0 <= other < schedule.n_stages:
        return None
    source, destination = schedule.device_of(stage, m), schedule.device_of(other, m)
    return None if source == destination else Message(action, max(stage, other), source, destination)


def _find_arrival(schedule: Schedule, made: Action, stage: int, op: str) -> Need:
    """Return what `stage` waits for: the action `made` of a neighbouring stage, or what it makes to arrive by `op`."""
    m = made.microbatch
    if schedule.device_of(made.stage, m) == schedule.device_of(stage, m):
        return made, None
    if schedule.transfers:
        return Action(stage, op, m, schedule.replica_of.get((stage, m), 0)), None
    # A boundary has the number of the stage behind it.
    return made, max(stage, made.stage)


def with_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule with each send right after the action that makes a value, and each receive before its use.

    `0F0 0B0 / 1F0 1B0` becomes `0F0 0SEND_F0 0RECV_B0 0B0 / 1RECV_F0 1F0 1B0 1SEND_B0`.
    """
    rows: list[list[Action]] = [[] for _ in schedule.actions]
    # Transfers that the schedule has already are left out first, so that none stands twice.
    for device, row in enumerate(without_transfers(schedule).actions):
        for action in row:
            received, sent = [], []
            # Values go forward over the boundary before a stage and then over the one behind it; gradients come back.
            if action.op == FORWARD:
                received = _list_transfers(schedule, action, RECV_F, action.stage)
                sent = _list_transfers(schedule, action, SEND_F, action.stage + 1)
            elif action.op in GRADIENTS:
                received = _list_transfers(schedule, action, RECV_B, action.stage + 1)
                sent = _list_transfers(schedule, action, SEND_B, action.stage)
            rows[device] += [*received, action, *sent]
    return replace(schedule, actions=tuple(tuple(row) for row in rows))


def without_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule of what devices compute; readers of such a schedule add the transfers in their minds."""
    return replace(schedule, actions=tuple(tuple(a for a in row if a.op not in TRANSFERS) for row in schedule.actions))


def _list_transfers(schedule: Schedule, action: Action, op: str, boundary: int) -> list[Action]:
    """Return the transfer `op` that an action asks for, or nothing where its microbatch stays on one device.

    The boundary is the cut between stages `boundary` - 1 and `boundary`. A stage with several replicas sends one
    microbatch here and the next one there, so what crosses depends on the microbatch.
    """
    m = action.microbatch
    # No stage lies before the first boundary, and none behind the last one.
    inside = 0 < boundary < schedule.n_stages
    if not inside or schedule.device_of(boundary - 1, m) == schedule.device_of(boundary, m):
        return []
    return [Action(action.stage, op, m, action.replica)]
