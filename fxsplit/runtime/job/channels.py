"""Channels: how the devices of a job exchange messages. A job has no other way to reach another device.

    device 0: send(1, message) --> inbox of device 1 --> receive(1, action)
    any device: fail()         --> every send and receive of the job raises JobStopped

Within a process each device has an inbox. Ranks run the same job over their own channels (`ranks/wire/channels.py`).
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
    """A message between devices: the action that waits for the message, the values, and a token.

    token: the receiver's stream waits for this mark before it reads the values (None: the values are ready).
    about: for each value, whether a gradient is wanted for it, or the leaf that a gradient belongs to.
    """

    action: Action
    values: Sequence[Any]
    token: Any
    about: Sequence[Any] = ()


class JobStopped(Exception):
    """The job has failed on some device, so no more messages will come."""


class Channels(Protocol):
    """The channels between the devices of one job. Any thread may send and fail; each device receives in one thread.

    The channels own the messages that were sent and not received yet. If the job fails, they end all waits.
    """

    def send(self, device: int, message: Message) -> None:
        """Send a message to a device, if need be after a wait for free space.

        Raises JobStopped if the job fails meanwhile.
        """

    def receive(self, device: int, action: Action) -> Message:
        """Wait for the message for one of a device's actions, and return it. Raises JobStopped if the job failed."""

    def fail(self) -> None:
        """Make every present and future send or receive that waits raise JobStopped."""


class Inbox(SimpleQueue[Message | None]):
    """The messages for one device; the message None says that the job has failed. Senders never wait."""


class BoundedInbox(Inbox):
    """An inbox for one message: a sender waits until the previous message has been taken.

    So a fast stage cannot fill the memory with outputs for a slower stage. Use this inbox only if each device has one
    stage: a device with several stages might wait for a message that it has yet to send itself.
    """

    def __init__(self) -> None:
        self._room = Semaphore(1)
        self._failed = False

    def put(self, item: Message | None, block: bool = True, timeout: float | None = None) -> None:
        """Put a message, after a wait until the inbox is empty. Raises JobStopped if the job failed.

        None is put at once.
        """
        if item is None:
            self._failed = True
        else:
            self._room.acquire()
            if self._failed:
                # Pass the permit on, so that the next waiting sender ends too.
                self._room.release()
                raise JobStopped
        super().put(item)
        if item is None:
            self._room.release()

    def get(self, block: bool = True, timeout: float | None = None) -> Message | None:
        """Return the next message, and let a waiting sender put another."""
        item = super().get()
        self._room.release()
        return item


class Inboxes:
    """Channels within a process: each device has an inbox of type `kind`."""

    def __init__(self, n_devices: int, kind: type[Inbox] = Inbox) -> None:
        self._inboxes = [kind() for _ in range(n_devices)]
        # Only the device's own thread touches its dictionary, so no lock is needed.
        self._arrived: list[dict[Action, Message]] = [{} for _ in range(n_devices)]

    def send(self, device: int, message: Message) -> None:
        """Put a message into a device's inbox. Raises JobStopped if the job fails while this waits for free space."""
        # Tensors are passed as they are: devices of a process share memory, or their streams copy.
        self._inboxes[device].put(message)

    def receive(self, device: int, action: Action) -> Message:
        """Return the message for an action. Messages for other actions are kept for later."""
        # Messages of two neighbours arrive in any order, but a device takes them in the order of its schedule.
        arrived = self._arrived[device]
        while action not in arrived:
            message = self._inboxes[device].get()
            if message is None:
                # Put it back for the next wait: a failed job stays failed.
                self._inboxes[device].put(None)
                raise JobStopped
            arrived[message.action] = message
        return arrived.pop(action)

    def fail(self) -> None:
        """Wake every device that waits to receive or to send."""
        for inbox in self._inboxes:
            inbox.put(None)


def make_inboxes(schedule: Schedule, *, bounded: bool) -> Inboxes:
    """Return the channels between the devices of a schedule.

    bounded: let senders wait until the receiver has taken the previous message, if each device has only one stage.
    """
    stages = Counter(device for home in schedule.homes for device in home)
    return Inboxes(schedule.n_devices, BoundedInbox if bounded and max(stages.values()) == 1 else Inbox)
