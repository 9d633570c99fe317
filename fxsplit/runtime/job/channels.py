"""Channels: how the devices of a job talk: send, receive, fail. A job knows no other way to another device.

Within a process each device has an inbox. Devices of other processes would need other channels, and the same job.
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
    """What one device sends another: the action that is waiting for it, the values, and a token.

    The token is what the receiver's stream must wait for until the values are there; None where they are there already.
    `about` says what the values are: for each, whether a gradient is wanted, or the leaf whose gradient it is.
    """

    action: Action
    values: Sequence[Any]
    token: Any
    about: Sequence[Any] = ()


class JobStopped(Exception):
    """The job has failed on some device: nothing more will come."""


class Channels(Protocol):
    """The channels among the devices of one job. Any thread may send and fail; each device receives in one thread."""

    def send(self, device: int, message: Message) -> None:
        """Send a message to a device, perhaps after waiting for room; raises JobStopped if the job failed meanwhile."""

    def receive(self, device: int, action: Action) -> Message:
        """Wait for the message for one of a device's actions, and return it; raises JobStopped if the job failed."""

    def fail(self) -> None:
        """Let every device that waits, and every one that will, raise JobStopped."""


class Inboxes:
    """Channels within a process: one queue for each device."""

    def __init__(self, n_devices: int) -> None:
        self._inboxes: list[SimpleQueue[Message | None]] = [SimpleQueue() for _ in range(n_devices)]
        # Each is written by its device's own thread alone, so no lock is needed.
        self._arrived: list[dict[Action, Message]] = [{} for _ in range(n_devices)]

    def send(self, device: int, message: Message) -> None:
        """Put a message into a device's inbox."""
        # Tensors are handed over as they are: all devices of a process see one memory, or copy from stream to stream.
        self._inboxes[device].put(message)

    def receive(self, device: int, action: Action) -> Message:
        """Return the message for an action, keeping what arrives meanwhile for later ones."""
        # Messages of two neighbours may come in any order, and a device must take them in its schedule's.
        arrived = self._arrived[device]
        while action not in arrived:
            message = self._take(device)
            if message is None:
                # Put back for whoever waits next: a job that has failed stays so.
                self._inboxes[device].put(None)
                raise JobStopped
            arrived[message.action] = message
        return arrived.pop(action)

    def _take(self, device: int) -> Message | None:
        """Return the next message of an inbox, after waiting for it; None if the job has failed."""
        return self._inboxes[device].get()

    def fail(self) -> None:
        """Wake every device that waits."""
        for inbox in self._inboxes:
            inbox.put(None)


class BoundedInboxes(Inboxes):
    """Inboxes that hold one message each: who would send another waits until the one before has been taken.

    So a stage that is faster than the next one does not fill the memory with what it makes. A device must not need what
    it has yet to send room for, as it may with several stages.
    """

    def __init__(self, n_devices: int) -> None:
        super().__init__(n_devices)
        self._room = [Semaphore(1) for _ in range(n_devices)]
        self._failed = False

    def send(self, device: int, message: Message) -> None:
        """Put a message into a device's inbox, after waiting for room; raises JobStopped if the job failed."""
        self._room[device].acquire()
        if self._failed:
            # The next one that waits is to end as well.
            self._room[device].release()
            raise JobStopped
        super().send(device, message)

    def _take(self, device: int) -> Message | None:
        """Return the next message of an inbox, and make room for another one."""
        message = super()._take(device)
        self._room[device].release()
        return message

    def fail(self) -> None:
        """Wake every device that waits, to receive or to send."""
        self._failed = True
        super().fail()
        for room in self._room:
            room.release()


def make_inboxes(schedule: Schedule, *, bounded: bool) -> Inboxes:
    """Return channels for the devices of a schedule, bounded if asked for and if each device has one stage."""
    stages = Counter(device for home in schedule.homes for device in home)
    return (BoundedInboxes if bounded and max(stages.values()) == 1 else Inboxes)(schedule.n_devices)
