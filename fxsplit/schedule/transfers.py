"""Transfers: add what devices send and receive to a schedule of what they compute, and leave it out again.

Generators make schedules without transfers. torch's runtime wants them written out.
"""

from __future__ import annotations

from dataclasses import replace

from fxsplit.schedule.action import FORWARD, GRADIENTS, RECV_B, RECV_F, SEND_B, SEND_F, TRANSFERS, Action
from fxsplit.schedule.schedule import Schedule


def with_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule with each send right after the action that makes a value, and each receive before its use.

    `0F0 0B0 / 1F0 1B0` becomes `0F0 0SEND_F0 0RECV_B0 0B0 / 1RECV_F0 1F0 1B0 1SEND_B0`.
    """
    rows: list[list[Action]] = [[] for _ in schedule.actions]
    # Transfers that the schedule has already are left out first, so that none stands twice.
    for device, row in enumerate(without_transfers(schedule).actions):
        for action in row:
            rows[device] += [*_list_receives(schedule, action), action, *_list_sends(schedule, action)]
    return replace(schedule, actions=tuple(tuple(row) for row in rows))


def without_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule of what devices compute; readers of such a schedule add the transfers in their minds."""
    return replace(schedule, actions=tuple(tuple(a for a in row if a.op not in TRANSFERS) for row in schedule.actions))


def _list_receives(schedule: Schedule, action: Action) -> list[Action]:
    """Return what a device receives before an action: nothing, or one value or gradient."""
    # The boundaries of stage s are s before it and s + 1 behind it.
    stage, m, last = action.stage, action.microbatch, schedule.n_stages - 1
    if action.op == FORWARD and stage > 0 and _crosses(schedule, stage, m):
        return [Action(stage, RECV_F, m, action.replica)]
    if action.op in GRADIENTS and stage < last and _crosses(schedule, stage + 1, m):
        return [Action(stage, RECV_B, m, action.replica)]
    return []


def _list_sends(schedule: Schedule, action: Action) -> list[Action]:
    """Return what a device sends after an action: nothing, or one value or gradient."""
    stage, m, last = action.stage, action.microbatch, schedule.n_stages - 1
    if action.op == FORWARD and stage < last and _crosses(schedule, stage + 1, m):
        return [Action(stage, SEND_F, m, action.replica)]
    if action.op in GRADIENTS and stage > 0 and _crosses(schedule, stage, m):
        return [Action(stage, SEND_B, m, action.replica)]
    return []


def _crosses(schedule: Schedule, boundary: int, m: int) -> bool:
    """Return whether microbatch m changes devices at a boundary, the cut between stages `boundary` - 1 and `boundary`.

    A stage with several replicas sends one microbatch here and the next one there, so this depends on m.
    """
    return schedule.device_of(boundary - 1, m) != schedule.device_of(boundary, m)
