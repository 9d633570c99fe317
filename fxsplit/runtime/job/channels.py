"""Channels: how the devices of a job exchange messages. A job knows no other way to reach another device.

    device 0: send(1, message) --> inbox of device 1 --> receive(1, action)
    any device: fail()         --> every send and receive of the job raises JobStopped

Within a process each device has an inbox. Ranks have channels of their own (`ranks/wire/channels.py`) and run the same
job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Semaphore
from typing import Any, NamedTuple, Protocol

from fxsplit.schedule.action import Action
from fxsplit.schedule.schedule import Schedule


class Message(NamedTuple):
    """A message between devices: the action that waits for it, the values, and a token.

    The receiver's stream waits for the token before it reads the values (None: they are ready). `about` describes each
    value: whether a gradient is wanted, or the leaf that a gradient is for.
    """

    action: Action
    values: Sequence[Any]
    token: Any
    about: Sequence[Any] = ()


class JobStopped(Exception):
    """The job has failed on some device: no more messages will come."""


class Channels(Protocol):
    """The channels between the devices of one job. Any thread may send and fail; each device receives in one thread."""

    def send(self, device: int, message: Message) -> None:
        """Send a message to a device, perhaps after a wait for room. Raises JobStopped if the job failed meanwhile."""

    def receive(self, device: int, action: Action) -> Message:
        """Wait for the message for one of a device's actions, and return it. Raises JobStopped if the job failed."""

    def fail(self) -> None:
        """Make every present and future wait of a device raise JobStopped."""


class Inboxes:
    """Channels within a process: one queue for each device."""

    def __init__(self, n_devices: int) -> None:
        self._inboxes: list[SimpleQueue[Message | None]] = [SimpleQueue() for _ in range(n_devices)]
        # Only the device's own thread touches its dictionary, so no lock is needed.
        self._arrived: list[dict[Action, Message]] = [{} for _ in range(n_devices)]

    def send(self, device: int, message: Message) -> None:
        """Put a message into a device's inbox."""
        # Tensors are passed as they are: devices of a process share memory, or their streams copy.
        self._inboxes[device].put(message)

    def receive(self, device: int, action: Action) -> Message:
        """Return the message for an action. Messages for other actions are kept for later."""
        # Messages of two neighbours arrive in any order, but a device takes them in the order of its schedule.
        arrived = self._arrived[device]
        while action not in arrived:
            message = self._take(device)
            if message is None:
                # Put it back for the next wait: a failed job stays failed.
                self._inboxes[device].put(None)
                raise JobStopped
            arrived[message.action] = message
        return arrived.pop(action)

    def _take(self, device: int) -> Message | None:
        """Wait for the next message of an inbox and return it; None if the job has failed."""
        return self._inboxes[device].get()

    def fail(self) -> None:
        """Wake every waiting device."""
        for inbox in self._inboxes:
            inbox.put(None)


class BoundedInboxes(Inboxes):
    """Inboxes for one message each: a sender waits until the previous message has been taken.

    So a fast stage does not fill the memory with outputs for a slower one. Use them only if each device has one stage:
    a device with several might wait for a message that it has yet to send.
    """

    def __init__(self, n_devices: int) -> None:
        super().__init__(n_devices)
        self._room = [Semaphore(1) for _ in range(n_devices)]
        self._failed = False

    def send(self, device: int, message: Message) -> None:
        """Put a message into a device's inbox, after a wait for room. Raises JobStopped if the job failed."""
        self._room[device].acquire()
        if self._failed:
            # Pass the permit on, so that the next waiting sender ends too.
            self._room[device].release()
            raise JobStopped
        super().send(device, message)

    def _take(self, device: int) -> Message | None:
        """Return the next message of an inbox, and make room for another message."""
        message = super()._take(device)
        self._room[device].release()
        return message

    def fail(self) -> None:
        """Wake every device that waits to receive or to send."""
        self._failed = True
        super().fail()
        for room in self._room:
            room.release()


def make_inboxes(schedule: Schedule, *, bounded: bool) -> Inboxes:
    """Return channels for the devices of a schedule, bounded if `bounded` and if each device has one stage."""
    stages = Counter(device for home in schedule.homes for device in home)
    return (BoundedInboxes if bounded and max(stages.values()) == 1 else Inboxes)(schedule.n_devices)
