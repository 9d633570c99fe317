"""DualPipeV: a forward and a backward of different microbatches run together, so that transfers of one hide behind the
other (DeepSeek-AI 2024, github.com/deepseek-ai/DualPipe).
"""

from __future__ import annotations

from collections import Counter, deque

from fxsplit.schedule.action import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from fxsplit.schedule.generators.synchronous import check_stages_per_device
from fxsplit.schedule.homes import go_there_and_back
from fxsplit.schedule.schedule import Schedule


def dual_pipe_v(n_devices: int, n_microbatches: int, stages_per_device: int = 2) -> Schedule:
    """Return DualPipeV (DeepSeek-AI 2024): two stages a device, there and back, with paired forwards and backwards.

    On 2 devices with 4 microbatches. A `+` joins a forward and a backward that run together, as `Schedule.paired` says:

        0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3+3B1 3F2+0B0 3B2 3F3+0B1 3B3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 1F2 2B0 2F2+1B0 1F3+2B1 2F3+1B1 2B2 1B2 2I3 1I3 2W3 1W3

    A device has at most 2 n_devices + 1 forwards in flight, each half as long as under 1F1B: half a microbatch more
    than the first device under 1F1B. With fewer than 2 n_devices microbatches, the schedule is generated for 2
    n_devices, and the actions of the missing microbatches are removed. The order does not depend on times. Raises
    ScheduleError unless a device has two stages.
    """
    check_stages_per_device("DualPipeV", stages_per_device, 2)
    rows, paired = [], set[Action]()
    for device in range(n_devices):
        walk = _Walk(device, 2 * n_devices - 1 - device)
        walk.go(n_devices - 1 - device, max(n_microbatches, 2 * n_devices) - 2 * n_devices + device + 1)
        rows.append(tuple(action for action in walk.row if action.microbatch < n_microbatches))
        # The backward of a pair has an earlier microbatch than the forward, so no pair loses only its backward.
        paired |= {action for action in walk.paired if action.microbatch < n_microbatches}
    return Schedule("DualPipeV", n_microbatches, go_there_and_back(n_devices), tuple(rows), paired=frozenset(paired))


class _Walk:
    """The growing row of one device. Each added action takes the next microbatch of its stage and direction."""

    def __init__(self, first: int, second: int) -> None:
        self.first, self.second = first, second
        self.row: list[Action] = []
        self.paired: set[Action] = set()
        self._late: deque[Action] = deque()
        self._done: Counter[tuple[int, bool]] = Counter()

    def go(self, later: int, turns: int) -> None:
        """Add all actions of a device that has `later` devices after it.

        In the middle it takes `turns` turns of two pairs each.
        """
        first, second, own = self.first, self.second, self.first + 1
        self._run(*[(first, FORWARD)] * (2 * later))
        self._run(*[(first, FORWARD), (second, FORWARD)] * own)
        for _ in range(later):
            self._run((second, INPUT_GRADIENT))
            self._catch_up()
            self._run((second, FORWARD))
        for turn in range(turns):
            # Its authors leave the first two actions of the last device unpaired, which shortens the start.
            self._pair(first, second, together=turn > 0 or later > 0)
            self._pair(second, first)
        for _ in range(later):
            self._run((second, BACKWARD))
            self._pair(second, first)
        # At the end, input gradients go ahead of weight gradients: the devices before wait for them.
        self._run(*[(second, BACKWARD), (first, BACKWARD)] * (own // 2))
        if own % 2:
            self._run((second, BACKWARD), (first, INPUT_GRADIENT))
        self._run(*[(second, INPUT_GRADIENT), (first, INPUT_GRADIENT)] * (own // 2))
        for _ in range(later):
            self._catch_up()
            self._run((first, INPUT_GRADIENT))
        while self._late:
            self._catch_up()

    def _run(self, *kinds: tuple[int, str]) -> None:
        """Add the next forward or backward of each (stage, operation)."""
        for stage, op in kinds:
            kind = stage, op == FORWARD
            self.row.append(Action(stage, op, self._done[kind]))
            self._done[kind] += 1
            if op == INPUT_GRADIENT:
                self._late.append(self.row[-1]._replace(op=WEIGHT_GRADIENT))

    def _pair(self, forward: int, backward: int, *, together: bool = True) -> None:
        """Add a forward of one stage and a backward of the other."""
        self._run((forward, FORWARD))
        if together:
            self.paired.add(self.row[-1])
        self._run((backward, BACKWARD))

    def _catch_up(self) -> None:
        """Add the oldest weight gradient that is still to be done."""
        self.row.append(self._late.popleft())
