"""Transfers: a schedule with what goes between devices written out."""

from __future__ import annotations

from dataclasses import replace

from fxsplit.schedule.action import FORWARD, GRADIENTS, RECV_B, RECV_F, SEND_B, SEND_F, TRANSFERS, Action
from fxsplit.schedule.schedule import Schedule


def with_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule with every send right after what makes a value, and every receive right before its use."""
    rows: list[list[Action]] = [[] for _ in schedule.actions]
    for device, row in enumerate(without_transfers(schedule).actions):
        for action in row:
            rows[device] += [*_before(schedule, action), action, *_after(schedule, action)]
    return replace(schedule, actions=tuple(tuple(row) for row in rows))


def without_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule of what devices compute; transfers go without saying."""
    return replace(schedule, actions=tuple(tuple(a for a in row if a.op not in TRANSFERS) for row in schedule.actions))


def _before(schedule: Schedule, action: Action) -> list[Action]:
    """Return what a device receives for an action."""
    stage, m, last = action.stage, action.microbatch, schedule.n_stages - 1
    if action.op == FORWARD and stage > 0 and _crosses(schedule, stage, m):
        return [Action(stage, RECV_F, m, action.replica)]
    if action.op in GRADIENTS and stage < last and _crosses(schedule, stage + 1, m):
        return [Action(stage, RECV_B, m, action.replica)]
    return []


def _after(schedule: Schedule, action: Action) -> list[Action]:
    """Return what a device sends once an action is done."""
    stage, m, last = action.stage, action.microbatch, schedule.n_stages - 1
    if action.op == FORWARD and stage < last and _crosses(schedule, stage + 1, m):
        return [Action(stage, SEND_F, m, action.replica)]
    if action.op in GRADIENTS and stage > 0 and _crosses(schedule, stage, m):
        return [Action(stage, SEND_B, m, action.replica)]
    return []


def _crosses(schedule: Schedule, boundary: int, m: int) -> bool:
    """Return whether a microbatch changes devices between stage `boundary` - 1 and it."""
    return schedule.device_of(boundary - 1, m) != schedule.device_of(boundary, m)
