"""Routes: the messages that a rank receives from each other rank, in the order in which they are sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fxsplit.schedule.action import BACKWARD, FORWARD, GRADIENTS, REDUCE, Action
from fxsplit.schedule.schedule import Schedule


class Route(NamedTuple):
    """The messages that one device receives. A message is named by the action that needs it.

    incoming: for each sender, the actions whose messages it sends, in the order of the sender's row.
    source_of: for each action, the sender of its message.
    read_before: for each action, other actions whose messages its sender had to receive before it could send.
    """

    incoming: dict[int, list[Action]]
    source_of: dict[Action, int]
    read_before: dict[Action, tuple[Action, ...]]


def list_messages(schedule: Schedule, device: int) -> Iterator[tuple[str, Action, int]]:
    """Yield a device's messages in order, as ("send" or "receive", action that needs the message, other device).

    Messages of a device to itself are left out.
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
    """Return the messages that device `me` receives, from the rows of the devices that send them."""
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
