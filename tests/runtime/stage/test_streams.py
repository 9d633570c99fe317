"""Streams: a CPU's behaviour, and an accelerator's calls of its driver, which is faked here."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from fxsplit.runtime.stage.streams import (
    AcceleratorStream,
    DeviceStream,
    hand_over,
    make_caller_wait,
    make_stream,
    mark_caller,
)
from fxsplit.torch_internals.tensors import accelerators

CPU = torch.device("cpu")


class Token:
    """As an event: counts who waits for it."""

    waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_a_cpu_has_nothing_queued() -> None:
    stream: Any = make_stream(CPU)
    assert stream.mark() is None and type(stream) is DeviceStream
    with stream.enter():
        begin = stream.record_time()
    time.sleep(0.01)
    assert 0.01 <= stream.record_time() - begin < 5.0


def test_a_cpu_waits_for_what_an_accelerator_has_queued() -> None:
    stream, token = DeviceStream(CPU), Token()
    stream.wait_for(None)
    stream.wait_for(token)
    assert token.waited == 1


def test_values_are_copied_only_from_another_kind_of_device() -> None:
    class Elsewhere(torch.Tensor):
        """Says that it is on a GPU."""

        device: Any = torch.device("cuda", 0)

        def cpu(self, *args: Any, **kwargs: Any) -> Any:
            return "copied"

    here = torch.ones(2)
    elsewhere = torch.ones(2).as_subclass(Elsewhere)
    received = DeviceStream(CPU).receive([here, "text", None, elsewhere])
    assert received[0] is here and received[1:] == ["text", None, "copied"]
    assert DeviceStream(CPU).send([here, 3], CPU) == ([here, 3], None)


def test_a_caller_without_accelerators_has_nothing_to_mark_nor_to_wait_for() -> None:
    assert mark_caller([CPU, CPU]) == []
    make_caller_wait([CPU], [None])
    hand_over([torch.ones(1), "text", None])


# An accelerator's streams and their driver

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class FakeStream:
    """Records the work that is queued on it."""

    def __init__(self, name: str, device: torch.device, log: list[str]) -> None:
        self.name, self.device, self.log = name, device, log

    def record_event(self) -> Any:
        return FakeEvent(f"mark of {self.name}", self.log)

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits for {event.name}")


class FakeEvent:
    """An event that has not been reached until someone waits for it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.passed = name, log, False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True
        self.log.append(f"the host waits for {self.name}")


class Value(torch.Tensor):
    """A value on a device of the test's."""

    device: Any = None
    notes: list[str]

    def to(self, device: Any, **_: Any) -> Any:  # type: ignore[override]
        if device == self.device:
            return self
        self.notes.append(f"copy from {self.device} to {device}")
        return put(device, self.notes)


def put(device: torch.device, log: list[str]) -> Any:
    made = torch.ones(100).as_subclass(Value)
    made.device, made.notes = device, log
    return made


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install a driver that only records its calls."""
    found: list[str] = []
    numbers = iter(range(100))
    default = {d: FakeStream(f"default of {d}", d, found) for d in (FIRST, SECOND)}
    current: dict[Any, Any] = dict(default)
    monkeypatch.setattr(accelerators, "make_stream", lambda d: FakeStream(f"stream {next(numbers)} of {d}", d, found))
    monkeypatch.setattr(accelerators, "find_current_stream", lambda d=FIRST: current[d])
    monkeypatch.setattr(accelerators, "set_current_stream", lambda s: current.update({s.device: s}))
    monkeypatch.setattr(
        accelerators, "keep_until_read", lambda t, s: found.append(f"{t.device} memory kept for {s.name}")
    )
    monkeypatch.setattr(accelerators, "count_memory_bytes", lambda d: 100_000)
    return found


def test_a_copy_to_another_accelerator_is_queued_by_its_sender(log: list[str]) -> None:
    stream = make_stream(FIRST)
    (copied, number), token = stream.send([put(FIRST, log), 3], SECOND)
    assert copied.device == SECOND and number == 3
    # Stream 0 is the stages', 1 and 2 are the copies' at the far and the near end.
    assert log == [
        "stream 2 of cuda:0 waits for mark of stream 0 of cuda:0",
        "copy from cuda:0 to cuda:1",
        "cuda:0 memory kept for stream 2 of cuda:0",
    ]
    assert token.name == "mark of stream 1 of cuda:1"
    # Afterwards work of this thread goes to the stages' stream again, and the copies' streams stay.
    assert accelerators.find_current_stream(FIRST) is stream._stream  # type: ignore[attr-defined]
    assert stream.send([], SECOND)[1].name == token.name


def test_a_copy_to_the_host_is_queued_and_waited_for_there(log: list[str]) -> None:
    sent, token = make_stream(FIRST).send([put(FIRST, log)], CPU)
    assert sent[0].device == CPU and token.name == "mark of stream 1 of cuda:0"
    DeviceStream(CPU).receive(sent, token)
    assert log[-1] == "the host waits for mark of stream 1 of cuda:0"


def test_workers_of_one_accelerator_hand_over_without_a_copy(log: list[str]) -> None:
    value = put(FIRST, log)
    sent, token = make_stream(FIRST).send([value], FIRST)
    assert sent == [value] and sent[0] is value and log == []
    receiver = make_stream(FIRST)
    with receiver.enter():
        assert receiver.receive(sent, token)[0] is value
    assert log == [
        "stream 1 of cuda:0 waits for mark of stream 0 of cuda:0",
        "cuda:0 memory kept for stream 1 of cuda:0",
    ]


def test_a_worker_stays_near_its_accelerator(log: list[str]) -> None:
    """It may be ahead by values of a hundredth of the memory, 1,000 bytes here; a value takes 400."""
    receiver = make_stream(FIRST)
    for _ in range(3):
        receiver.receive([put(FIRST, log)])
    assert not [line for line in log if "the host waits" in line]
    receiver.receive([put(FIRST, log)])
    assert sum("the host waits" in line for line in log) == 1


def test_values_that_the_accelerator_has_come_to_are_forgotten(log: list[str]) -> None:
    receiver = AcceleratorStream(FIRST)
    for _ in range(10):
        receiver.receive([])
        receiver._received[-1][0].passed = True
    assert len(receiver._received) == 1


def test_each_stream_of_the_caller_waits_for_all_workers(log: list[str]) -> None:
    """On one device the caller may read a value that another device's worker has put there."""
    devices = [FIRST, SECOND, CPU]
    assert [token.name for token in mark_caller(devices)] == ["mark of default of cuda:0", "mark of default of cuda:1"]
    workers = [make_stream(device) for device in devices]
    make_caller_wait(devices, [worker.mark() for worker in workers])
    assert log == [
        f"default of {one} waits for mark of stream {i} of {other}"
        for one in (FIRST, SECOND)
        for i, other in enumerate((FIRST, SECOND))
    ]


def test_a_block_on_a_stream_leaves_the_thread_as_it_was(log: list[str]) -> None:
    before = accelerators.find_current_stream(SECOND)
    with make_stream(SECOND).enter():
        assert accelerators.find_current_stream(SECOND) is not before
    assert accelerators.find_current_stream(SECOND) is before
