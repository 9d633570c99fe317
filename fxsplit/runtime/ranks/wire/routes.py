"""Routes: which messages a rank gets from which other one, in the order in which they are sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fxsplit.schedule.action import BACKWARD, FORWARD, GRADIENTS, REDUCE, Action
from fxsplit.schedule.schedule import Schedule


class Route(NamedTuple):
    """What comes to one device.

    incoming: for each other device, the actions that its messages are for, in the order of that device's row.
    source_of: where the message for an action comes from. read_before: for such an action, the actions whose messages
    its sender must have received before it could send this one.
    """

    incoming: dict[int, list[Action]]
    source_of: dict[Action, int]
    read_before: dict[Action, tuple[Action, ...]]


def list_messages(schedule: Schedule, device: int) -> Iterator[tuple[str, Action, int]]:
    """Yield what a device sends and receives, in order: "send" or "receive", the action it is for, and the other end.

    Messages that a device sends to itself are left out.
    """
    last = schedule.n_stages - 1
    for action in schedule.actions[device]:
        stage, m = action.stage, action.microbatch
        given: list[tuple[str, Action, int]] = []
        if action.op == FORWARD:
            if stage > 0:
                given.append(("receive", Action(stage, FORWARD, m), schedule.device_of(stage - 1, m)))
            if stage < last:
                given.append(("send", Action(stage + 1, FORWARD, m), schedule.device_of(stage + 1, m)))
        elif action.op in GRADIENTS:
            if stage < last:
                given.append(("receive", Action(stage, BACKWARD, m), schedule.device_of(stage + 1, m)))
            if stage > 0:
                given.append(("send", Action(stage - 1, BACKWARD, m), schedule.device_of(stage - 1, m)))
        elif action.op == REDUCE and action.replica:
            given.append(("send", action, schedule.homes[stage][0]))
        elif action.op == REDUCE:
            others = enumerate(schedule.homes[stage][1:], 1)
            given += [("receive", action._replace(replica=number), other) for number, other in others]
        yield from (one for one in given if one[2] != device)


def find_routes(schedule: Schedule, me: int) -> Route:
    """Return what comes to a device, from the rows of the devices that send it."""
    incoming: dict[int, list[Action]] = {}
    source_of: dict[Action, int] = {}
    read_before: dict[Action, tuple[Action, ...]] = {}
    for source in range(schedule.n_devices):
        if source == me:
            continue
        read: list[Action] = []
        for way, action, other in list_messages(schedule, source):
            if other != me:
                continue
            if way == "receive":
                read.append(action)
                continue
            incoming.setdefault(source, []).append(action)
            source_of[action] = source
            read_before[action], read = tuple(read), []
    return Route(incoming, source_of, read_before)


def find_pairs(schedule: Schedule) -> set[tuple[int, int]]:
    """Return the (sender, receiver) of all messages of a schedule."""
    return {
        (device, other)
        for device in range(schedule.n_devices)
        for way, _, other in list_messages(schedule, device)
        if way == "send"
    }
