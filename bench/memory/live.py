"""List the storages that a worker holds at its peak, by the operator that made them: the output of `--live`.

Every storage that is made or freed in a step is logged, with the action and the operators that ran then. Storages from
before the step, such as weights and the optimizer's state, are one sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest import mock

from bench.memory.counter import start_counting
from fxsplit.runtime.job.job import Job
from fxsplit.runtime.stage.streams import DeviceStream
from fxsplit.schedule.action import Action

Handler = Callable[[Job, Action, int, DeviceStream], None]


class Storage(NamedTuple):
    """One kind of storage at a peak: the action and the operators in which it was made, and its bytes."""

    action: str
    maker: str
    size: int


@dataclass
class Log:
    """The storages of each device at its peak, with the number of each; filled when a log's block ends."""

    storages: dict[int, Counter[Storage]] = field(default_factory=dict)


@contextmanager
def log_storages() -> Iterator[Log]:
    """Log the storages that are made and freed inside the block, which runs one job."""
    counter, log = start_counting(), Log()
    actions: list[str] = [""]

    def name_action(do: Handler) -> Handler:
        def named(job: Job, action: Action, device: int, stream: DeviceStream) -> None:
            actions.append(str(action))
            counter.choose_action(len(actions) - 1)
            do(job, action, device, stream)

        return named

    with mock.patch.object(Job, "HANDLERS", {op: name_action(do) for op, do in Job.HANDLERS.items()}):
        counter.start_log()
        try:
            yield log
        finally:
            count = counter.stop_log()
    events = counter.read_events()
    rows = [tuple(events[4 * i : 4 * i + 4]) for i in range(count)]
    for slot in sorted({slot for _, _, slot, _ in rows if slot}):
        log.storages[slot - 1] = _find_peak([r for r in rows if r[2] == slot], actions)


def _find_peak(rows: list[tuple[int, ...]], actions: list[str]) -> Counter[Storage]:
    """Return the storages that were alive at a slot's peak."""
    read_maker = start_counting().read_maker
    now = most = 0
    place = -1
    for i, (_, size, _, _) in enumerate(rows):
        now += size
        if now > most:
            most, place = now, i
    there: dict[int, Storage] = {}
    for number, size, _, action in rows[: place + 1]:
        if size > 0:
            there[number] = Storage(actions[action], read_maker(number).decode(), size)
        else:
            there.pop(number, None)
    return Counter(there.values())
