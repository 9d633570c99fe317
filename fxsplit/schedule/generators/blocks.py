"""Building blocks: one microbatch's actions on all devices, repeated with a period (Qi et al. 2024).

A block states when each forward (F) and input gradient (I) of microbatch 0 starts, if every action takes one unit of
time. Microbatch m does the same m periods later. V-Half on 2 devices, with room for two W (weight gradients) a period:

    device 0: 0F0 .   .   .   3F0 3I0 0F1 .   .   .   3F1 3I1 0F2 0I0 .   .   3F2 3I2      device 0 has stages 0 and 3
    device 1: .   1F0 2F0 .   .   .   2I0 1F1 2F1 .   .   1I0 2I1 1F2 2F2 .   .   1I1      device 1 has stages 1 and 2

The time from a forward to its input gradient decides how much a device holds: a block that comes back early holds less.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

from fxsplit.schedule.action import FORWARD, INPUT_GRADIENT, Action
from fxsplit.schedule.generators.fill import LARGE, SHARES, choose, fill, take_times
from fxsplit.schedule.generators.synchronous import check_stages_per_device
from fxsplit.schedule.homes import go_there_and_back
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.simulation.simulate import Times

PERIOD = 6
"""The work of a device on one microbatch in unit times: a forward, an I and a W of each of its two stages."""
FEWEST = SHARES[1::2]
"""The shares of a W that a gap must have room for, tried in large schedules; small ones try all SHARES. All devices get
the same share.
"""


class Offsets(NamedTuple):
    """The times between starts on neighbouring devices, in units of one action.

    - `down`: between forwards on the way down the line of devices
    - `back`: between forwards on the way back
    - `both`: the sum of a stage's offset between forwards and its offset between input gradients
    """

    down: int
    back: int
    both: int


Block = tuple[tuple[int, int, int, int], ...]
"""Four starts for each device: F of its first stage, F of its second, I of its second, and I of its first."""


def v_half(n_devices: int, n_microbatches: int, stages_per_device: int = 2, times: Times | None = None) -> Schedule:
    """Return V-Half (Qi et al. 2024): two stages a device, there and back, with half of 1F1B's memory and a bit more.

    A device is at most n_devices + 1 forwards ahead of its input gradients and n_devices + 3 ahead of its weight
    gradients, and never more than 2 n_devices. Each forward is half as long as under 1F1B, whose first device holds
    2 n_devices of such halves. If an I frees nothing, that is 1/2 + 3 / (2 n_devices) of 1F1B's memory: 0.69 on 8
    devices, 0.55 on 32. With the shares that an I frees in the models of `bench.zero_bubble`, it is 0.61 to 0.62 on 8
    devices, 0.53 on 32. Raises ScheduleError unless a device has two stages.
    """
    return _repeat("V-Half", n_devices, n_microbatches, stages_per_device, times, Offsets(1, 2, 3))


def v_min(n_devices: int, n_microbatches: int, stages_per_device: int = 2, times: Times | None = None) -> Schedule:
    """Return V-Min (Qi et al. 2024): V-Half with a third of 1F1B's memory and a bit more, and more idle time.

    A device is at most 2 (n_devices // 3) + 2 forwards ahead of its input gradients and 2 more ahead of its weight
    gradients, and never more than 2 n_devices. If an I frees nothing, that is 0.50 of 1F1B's memory on 8 devices, 0.38
    on 32. With the shares that an I frees in the models of `bench.zero_bubble`, it is 0.42 to 0.43 on 8 devices, 0.36
    on 32. Raises ScheduleError unless a device has two stages.
    """
    return _repeat("V-Min", n_devices, n_microbatches, stages_per_device, times, Offsets(1, 1, 2))


def _repeat(
    name: str, n_devices: int, n_microbatches: int, stages_per_device: int, times: Times | None, offsets: Offsets
) -> Schedule:
    """Return the schedule that repeats the block with the least memory for each microbatch, and puts W in the gaps."""
    check_stages_per_device(name, stages_per_device, 2)
    homes = go_there_and_back(n_devices)
    used = take_times(name, n_microbatches, homes, times)
    block = _find_block(n_devices, offsets)
    orders = [_unroll(starts, device, n_devices, n_microbatches) for device, starts in enumerate(block)]
    # A W of each of the device's stages may wait. Waiting W hold memory, and fill the gaps between unequal times.
    most = min(_count_most(block) + 2, 2 * n_devices)
    shares = SHARES if sum(map(len, orders)) < LARGE else FEWEST
    filled = fill(orders, n_microbatches, homes, used, most, [(share, share) for share in shares])
    return replace(choose([filled], used), name=name)


def _find_block(n_devices: int, offsets: Offsets) -> Block:
    """Return the block without conflicts that holds the fewest microbatches.

    Of equal ones, return the block that waits least before its first I.

    Two actions of a device conflict if they start at the same time of a period. The offsets do not fix how long a
    microbatch waits where it turns round: on the last device, on the first device between F and I, and on the last
    device again. All values of these three waits are tried.
    """
    last, starts = n_devices - 1, range(1, PERIOD + 1)
    found = []
    for turns in product(starts, repeat=3):
        back = last * offsets.down + turns[0]
        gradient = back + last * offsets.back + turns[1]
        end = gradient + last * (offsets.both - offsets.back) + turns[2]
        block = tuple(
            (
                device * offsets.down,
                back + (last - device) * offsets.back,
                gradient + device * (offsets.both - offsets.back),
                end + (last - device) * (offsets.both - offsets.down),
            )
            for device in range(n_devices)
        )
        if all(len({start % PERIOD for start in row}) == len(row) for row in block):
            found.append((_count_most(block), turns[1], turns, block))
    return min(found)[-1]


def _count_most(block: Block) -> int:
    """Return the most forwards that any device is ahead of its input gradients if the block repeats without end."""
    # Before time t, microbatches 0 to (t - start) / PERIOD have started an action. The number is largest after an F.
    return max(
        sum((now - forward) // PERIOD - (now - gradient) // PERIOD for forward, gradient in ((f0, i0), (f1, i1)))
        for f0, f1, i1, i0 in block
        for now in (f0, f1)
    )


def _unroll(starts: tuple[int, ...], device: int, n_devices: int, n_microbatches: int) -> list[Action]:
    """Return the forwards and input gradients of a device in the order of their starts."""
    first, second = device, 2 * n_devices - 1 - device
    kinds = ((first, FORWARD), (second, FORWARD), (second, INPUT_GRADIENT), (first, INPUT_GRADIENT))
    timed = (
        (start + PERIOD * m, Action(stage, op, m))
        for start, (stage, op) in zip(starts, kinds, strict=True)
        for m in range(n_microbatches)
    )
    return [action for _, action in sorted(timed)]
