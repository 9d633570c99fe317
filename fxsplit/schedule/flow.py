"""Data flow: the actions that an action needs first, and the results that cross between devices.

Both the verifier and the simulator use this file. For example `1F3` needs `0F3`. If stages 0 and 1 live on different
devices, the result of `0F3` crosses boundary 1, the cut before stage 1. Generated schedules leave such *transfers* out;
torch's runtime wants sends and receives written out:

    device 0:  0F3  0SEND_F3
                        |          boundary 1
    device 1:      1RECV_F3  1F3
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fxsplit.schedule.action import (
    FORWARD,
    GRADIENTS,
    RECEIVES,
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
"""An action, and the boundary its result crosses (number of the stage after the cut), or None."""


class Transfer(NamedTuple):
    """A message between devices: the value made by a forward, or the gradient made by a backward.

    `made` is the action that makes it, `boundary` the number of the stage after the cut that it crosses.
    """

    made: Action
    boundary: int
    source: int
    destination: int


def drop_version(action: Action) -> Action:
    """Return an action without its weight version.

    Needs refer to actions without versions: the consumer of a forward does not know which weights the forward used.
    """
    return action._replace(version=0) if action.version else action


def find_needs(schedule: Schedule, action: Action) -> list[Need]:
    """Return the actions, without versions, that must finish before `action` can start."""
    stage, op, m = action.stage, action.op, action.microbatch
    replica = schedule.replica_of.get
    if op == FORWARD:
        if stage == 0:
            return []
        made = Action(stage - 1, FORWARD, m, replica((stage - 1, m), 0))
        return [_find_arrival(schedule, made, stage, RECV_F)]
    if op in GRADIENTS:
        # The backward of the last stage starts from the loss, which its own forward computes.
        found: list[Need] = [(Action(stage, FORWARD, m, action.replica), None)]
        if stage + 1 == schedule.n_stages:
            return found
        return [*found, _find_arrival(schedule, schedule.gradient(stage + 1, m), stage, RECV_B)]
    # A weight gradient continues a split backward after its input gradient, and SEND_B sends that input gradient.
    if op in (WEIGHT_GRADIENT, SEND_B):
        return [(schedule.gradient(stage, m), None)]
    if op == SEND_F:
        return [(Action(stage, FORWARD, m, action.replica), None)]
    # A send takes no device time: the message travels meanwhile, and the receive waits for it.
    if op == RECV_F:
        return [(Action(stage - 1, SEND_F, m, replica((stage - 1, m), 0)), stage)]
    if op == RECV_B:
        return [(Action(stage + 1, SEND_B, m, replica((stage + 1, m), 0)), stage + 1)]
    own = schedule.releases.get(stage, [])
    if op == REDUCE:  # the replicas reduce together, so each waits for the gradients of all
        return [(drop_version(a), None) for a in own]
    # A step uses its own replica's gradients of all microbatches up to its own.
    assert op == STEP
    return [(drop_version(a), None) for a in own if a.replica == action.replica and a.microbatch <= m]


def find_waits(schedule: Schedule, action: Action) -> list[Need]:
    """Return the actions that must finish before `action` can start if a receive waits for nothing.

    As in torch's runtime, a receive only posts a buffer, and the action that uses the value waits for its message.
    """
    if action.op in RECEIVES:
        return []
    needs = find_needs(schedule, action)
    return [find_needs(schedule, made)[0] if made.op in RECEIVES else (made, boundary) for made, boundary in needs]


def list_done(schedule: Schedule, device: int, position: int) -> tuple[Action, ...]:
    """Return the actions whose results may leave the device after the action at a position of its row."""
    row = schedule.actions[device]
    if not schedule.paired:
        return (row[position],)
    if row[position] in schedule.paired:
        return ()
    return row[position - 1 : position + 1] if position and row[position - 1] in schedule.paired else (row[position],)


def find_message(schedule: Schedule, action: Action) -> Transfer | None:
    """Return the message to another device that is ready once `action` is done, or None."""
    stage, m = action.stage, action.microbatch
    sends = (SEND_F, SEND_B) if schedule.transfers else (FORWARD, *GRADIENTS)
    if action.op not in sends:
        return None
    other = stage + 1 if action.op in (FORWARD, SEND_F) else stage - 1
    if not 0 <= other < schedule.n_stages:
        return None
    source, destination = schedule.device_of(stage, m), schedule.device_of(other, m)
    return None if source == destination else Transfer(action, max(stage, other), source, destination)


def _find_arrival(schedule: Schedule, made: Action, stage: int, op: str) -> Need:
    """Return how `stage` gets the result of a neighbour's action: from the action `made` itself, or, if transfers are
    written out, from the receive `op`.
    """
    m = made.microbatch
    if schedule.device_of(made.stage, m) == schedule.device_of(stage, m):
        return made, None
    if schedule.transfers:
        return Action(stage, op, m, schedule.replica_of.get((stage, m), 0)), None
    # A boundary has the number of the stage after it.
    return made, max(stage, made.stage)


def with_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule with a send right after the action that makes a value, and a receive right before its use.

    `0F0 0B0 / 1F0 1B0` becomes `0F0 0SEND_F0 0RECV_B0 0B0 / 1RECV_F0 1F0 1B0 1SEND_B0`.
    """
    rows: list[list[Action]] = [[] for _ in schedule.actions]
    # Remove existing transfers first, to avoid duplicates.
    for device, row in enumerate(without_transfers(schedule).actions):
        # The first of two actions that run together, its place in the row, and the sends that wait for the second.
        begin, late = 0, list[Action]()
        for action in row:
            received, sent = [], []
            # Values cross the boundary before the stage and then the boundary after it; gradients return.
            if action.op == FORWARD:
                received = _list_transfers(schedule, action, RECV_F, action.stage)
                sent = _list_transfers(schedule, action, SEND_F, action.stage + 1)
            elif action.op in GRADIENTS:
                received = _list_transfers(schedule, action, RECV_B, action.stage + 1)
                sent = _list_transfers(schedule, action, SEND_B, action.stage)
            if late or (rows[device] and rows[device][-1] in schedule.paired):
                rows[device][begin:begin] = received
                rows[device] += [action, *late, *sent]
                late = []
                continue
            begin = len(rows[device])
            rows[device] += [*received, action]
            if action in schedule.paired:
                late = sent
            else:
                rows[device] += sent
    return replace(schedule, actions=tuple(tuple(row) for row in rows))


def without_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule with only its compute actions. The transfers then follow from these actions."""
    return replace(schedule, actions=tuple(tuple(a for a in row if a.op not in TRANSFERS) for row in schedule.actions))


def _list_transfers(schedule: Schedule, action: Action, op: str, boundary: int) -> list[Action]:
    """Return the transfer `op` of an action as a list, empty if its microbatch stays on one device.

    `boundary` is the cut between stages `boundary` - 1 and `boundary`. Replicas take microbatches in turn, so the
    devices depend on the microbatch.
    """
    m = action.microbatch
    # The first stage has no boundary before it, and the last stage none after it.
    inside = 0 < boundary < schedule.n_stages
    if not inside or schedule.device_of(boundary - 1, m) == schedule.device_of(boundary, m):
        return []
    return [Action(action.stage, op, m, action.replica)]
