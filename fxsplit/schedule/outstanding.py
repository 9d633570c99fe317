"""Outstanding messages: values or gradients sent by a device that the receiver may not have taken yet.

This follows from the order of the actions, whatever their times. In `0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1` device 0 has
sent two values when 0B0 begins. It has received the gradient from 1B0, so device 1 has taken the value of 0F0. The
value of 0F1 may still wait:

    device 0:  0F0  0F1 ......... 0B0
                                 /
    device 1:       1F0  1B0 ---'  1F1 (may not have begun)
"""

from __future__ import annotations

from fxsplit.schedule.action import FORWARD, GRADIENTS, Action
from fxsplit.schedule.flow import find_needs
from fxsplit.schedule.schedule import Schedule

Outstanding = list[list[tuple[Action, ...]]]
"""[device][position]: the actions whose messages may still wait for their receiver when the action there begins."""


def list_outstanding(schedule: Schedule) -> Outstanding:
    """Return the messages that may still wait for their receiver when each action begins."""
    places = {_name(a): (d, i) for d, row in enumerate(schedule.actions) for i, a in enumerate(row)}
    found: Outstanding = []
    for device, row in enumerate(schedule.actions):
        # For each device, the position of the last action that is certainly over.
        over: dict[int, int] = {}
        waiting: dict[Action, tuple[int, int]] = {}
        rows: list[tuple[Action, ...]] = []
        for place, action in enumerate(row):
            for need, _ in find_needs(schedule, action):
                other, at = places[_name(need)]
                over[other] = max(over.get(other, -1), at)
            # An action takes its inputs when it begins.
            over[device] = place
            waiting = {made: (d, i) for made, (d, i) in waiting.items() if over.get(d, -1) < i}
            rows.append(tuple(waiting))
            taker = find_taker(schedule, action)
            if taker is not None:
                waiting[action] = places[_name(taker)]
        found.append(rows)
    return found


def find_taker(schedule: Schedule, action: Action) -> Action | None:
    """Return the action of another stage that takes the result of `action`, or None if there is none."""
    stage, m = action.stage, action.microbatch
    replica = schedule.replica_of.get
    if action.op == FORWARD and stage + 1 < schedule.n_stages:
        return Action(stage + 1, FORWARD, m, replica((stage + 1, m), 0))
    if action.op in GRADIENTS and stage > 0:
        return schedule.gradient(stage - 1, m)
    return None


def _name(action: Action) -> Action:
    """Return an action without its weight version, as `find_needs` names it."""
    return action._replace(version=0)
