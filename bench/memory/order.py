"""Let one device run as far ahead as the schedule allows: in this order it holds the most memory.

A sent message occupies its sender's memory until the receiver takes it, and that moment depends on the speed of both.
So every other device begins an action only while the first device waits for a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Condition
from unittest import mock

from fxsplit.runtime.job.channels import Inboxes, Message
from fxsplit.runtime.job.job import Job
from fxsplit.runtime.stage.streams import DeviceStream
from fxsplit.schedule.action import Action

Handler = Callable[[Job, Action, int, DeviceStream], None]

LONGEST_S = 60.0
"""The longest time that an action waits for its turn, because a device that has failed never waits for a message."""


class RunAhead:
    """Lets `device` run ahead in jobs that run inside of `lead`."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._turn = Condition()
        self._awaited: Action | None = None
        self._sent: set[Action] = set()
        self._over = False

    def wrap(self, do: Handler) -> Handler:
        """Return a handler of an action that waits for its turn."""

        def in_turn(job: Job, action: Action, device: int, stream: DeviceStream) -> None:
            if device != self._device:
                with self._turn:
                    self._turn.wait_for(lambda: self._over or self._awaited is not None, LONGEST_S)
            do(job, action, device, stream)
            if device == self._device and action == job.schedule.actions[device][-1]:
                self._release()

        return in_turn

    @contextmanager
    def lead(self) -> Iterator[None]:
        """Let the device run ahead inside the block."""
        receive, send = Inboxes.receive, Inboxes.send

        def note_wait(inboxes: Inboxes, device: int, action: Action) -> Message:
            with self._turn:
                # A message that was sent before is taken at once, so no other device need run for it.
                if device == self._device and action not in self._sent:
                    self._awaited = action
                    self._turn.notify_all()
            return receive(inboxes, device, action)

        def note_message(inboxes: Inboxes, device: int, message: Message) -> None:
            with self._turn:
                if device == self._device:
                    self._sent.add(message.action)
                    # The sender must not begin another action, because the device goes on.
                    if message.action == self._awaited:
                        self._awaited = None
            send(inboxes, device, message)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(Inboxes, "receive", note_wait))
            stack.enter_context(mock.patch.object(Inboxes, "send", note_message))
            yield

    def _release(self) -> None:
        """Let all devices go on: this device has done its last action."""
        with self._turn:
            self._over = True
            self._turn.notify_all()
