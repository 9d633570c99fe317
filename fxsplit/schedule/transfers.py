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
