"""Channels: a message reaches the action that waits for it, and a failure wakes every waiting device."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import StageError
from fxsplit.runtime import engine
from fxsplit.runtime.job.channels import BoundedInbox, Channels, Inbox, Inboxes, JobStopped, Message, make_inboxes
from fxsplit.runtime.job.job import Job
from fxsplit.schedule.action import BACKWARD, FORWARD, Action
from fxsplit.schedule.generators.synchronous import run_forwards
from tests.support.models import FAST, Mlp

FIRST, SECOND = Action(1, FORWARD, 0), Action(1, FORWARD, 1)


def test_messages_are_taken_in_the_order_of_the_schedule() -> None:
    channels = Inboxes(2)
    channels.send(1, Message(SECOND, "second", None))
    channels.send(0, Message(FIRST, "of another device", None))
    channels.send(1, Message(FIRST, "first", "token"))
    assert channels.receive(1, FIRST) == Message(FIRST, "first", "token")
    assert channels.receive(1, SECOND).values == "second"
    assert channels.receive(0, FIRST).values == "of another device"


def test_a_failure_wakes_who_waits_and_stays() -> None:
    channels = Inboxes(2)
    woken: list[bool] = []

    def wait() -> None:
        for _ in range(2):
            try:
                channels.receive(1, FIRST)
            except JobStopped:
                woken.append(True)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    channels.send(1, Message(SECOND, "for later", None))
    channels.fail()
    waiting.join(10.0)
    assert woken == [True, True]
    with pytest.raises(JobStopped):
        channels.receive(0, FIRST)


class Recording(Inboxes):
    """Inboxes that record each message and pass on copies, as between processes."""

    def __init__(self, n_devices: int) -> None:
        super().__init__(n_devices)
        self.sent: list[tuple[int, Action]] = []

    def send(self, device: int, message: Message) -> None:
        self.sent.append((device, message.action))
        super().send(device, message._replace(values=[v.clone() for v in message.values]))


def test_a_job_talks_only_through_the_channels_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Recording] = []

    def build(program: Any, schedule: Any, job_inputs: Any, **options: Any) -> Job:
        channels: Channels = Recording(schedule.n_devices)
        assert isinstance(channels, Recording)
        made.append(channels)
        return Job(program, schedule, job_inputs, **{**options, "channels": channels})

    x, y = torch.randn(8, 8), torch.randn(8, 3)
    options: Any = {"n_microbatches": 2, "loss_fn": F.mse_loss, "passes": FAST, "example_inputs": x}
    with fxsplit.compile(Mlp(), 2, **options) as pipe:
        expected = pipe.step(x, target=y)
        gradients = [p.grad for p in pipe.parameters()]
        pipe.zero_grad()
        monkeypatch.setattr(engine, "Job", build)
        found = pipe.step(x, target=y)
        assert torch.equal(found, expected)
        assert all(torch.equal(a, p.grad) for a, p in zip(gradients, pipe.parameters(), strict=True))  # type: ignore[arg-type]
    (channels,) = made
    crossings = {(1, Action(1, FORWARD, m)) for m in range(2)} | {(0, Action(0, BACKWARD, m)) for m in range(2)}
    assert set(channels.sent) == crossings and len(channels.sent) == len(crossings)


def test_a_failed_step_fails_the_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[bool] = []

    class Failing(Inboxes):
        def fail(self) -> None:
            failed.append(True)
            super().fail()

    monkeypatch.setattr(engine, "Job", lambda p, s, w, **o: Job(p, s, w, **{**o, "channels": Failing(2)}))
    x = torch.randn(8, 8)
    with fxsplit.compile(Mlp(), 2, example_inputs=x, loss_fn=F.mse_loss, passes=FAST) as pipe:
        with pytest.raises(StageError):
            pipe.step(x, target=torch.zeros(8, 4))
        assert failed


def test_bounded_inboxes_make_the_sender_wait() -> None:
    channels = Inboxes(2, BoundedInbox)
    channels.send(1, Message(FIRST, "first", None))
    sent: list[str] = []

    def send() -> None:
        channels.send(1, Message(SECOND, "second", None))
        sent.append("second")

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    sender.join(0.05)
    assert sender.is_alive() and not sent
    assert channels.receive(1, FIRST).values == "first"
    sender.join(10.0)
    assert sent == ["second"] and channels.receive(1, SECOND).values == "second"


def test_what_comes_out_of_order_makes_no_one_wait_for_ever() -> None:
    """Replicas of a stage send to one device, which takes their microbatches in turn."""
    channels = Inboxes(1, BoundedInbox)
    arrived: list[Any] = []

    def receive() -> None:
        arrived.extend(channels.receive(0, action).values for action in (FIRST, SECOND))

    receiver = threading.Thread(target=receive, daemon=True)
    receiver.start()
    for action, values in ((SECOND, "second"), (FIRST, "first")):
        channels.send(0, Message(action, values, None))
    receiver.join(10.0)
    assert arrived == ["first", "second"]


def test_a_failure_wakes_those_that_wait_for_room() -> None:
    channels = Inboxes(1, BoundedInbox)
    channels.send(0, Message(FIRST, "first", None))
    woken: list[bool] = []

    def send() -> None:
        try:
            channels.send(0, Message(SECOND, "second", None))
        except JobStopped:
            woken.append(True)

    senders = [threading.Thread(target=send, daemon=True) for _ in range(2)]
    for sender in senders:
        sender.start()
    channels.fail()
    for sender in senders:
        sender.join(10.0)
    assert woken == [True, True]


def test_devices_with_several_stages_have_no_bounds() -> None:
    for homes, bounded, kind in (
        (((0,), (1,)), True, BoundedInbox),
        (((0,), (1, 2)), True, BoundedInbox),
        (((0,), (1,), (0,)), True, Inbox),
        (((0,), (1,)), False, Inbox),
    ):
        made = make_inboxes(run_forwards(homes, 2), bounded=bounded)
        assert {type(inbox) for inbox in made._inboxes} == {kind}
