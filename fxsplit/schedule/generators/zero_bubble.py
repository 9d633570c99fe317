"""Zero-bubble schedules: split backwards, whose weight gradients (W) fill the time in which devices would wait.

A rule gives the order of forwards and input gradients, and fill.py puts W into the gaps of that order. The gaps depend
on the times of the stages, so a schedule is generated from `times`. Without `times`, F, I and W take equal times.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from fxsplit.schedule.action import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from fxsplit.schedule.generators.fill import Orders, choose, fill, take_times
from fxsplit.schedule.generators.greedy import Rows, list_schedule
from fxsplit.schedule.generators.synchronous import alternate_on, check_stages_per_device, order_interleaved
from fxsplit.schedule.homes import deal_in_turn, go_there_and_back, line
from fxsplit.schedule.schedule import Homes, Schedule
from fxsplit.schedule.simulation.simulate import Times


def zb_h1(n_devices: int, n_microbatches: int, stages_per_device: int = 1) -> Schedule:
    """Return ZB-H1 (Qi et al. 2023): 1F1B with split backwards, whose weight gradients fill idle time.

        device 0: F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
        device 1:    F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        device 2:       F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    As actions, on 2 devices with 4 microbatches:

        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3

    Other stages wait only for input gradients (I). Stage s delays a weight gradient (W) until s more input gradients
    are done. Later stages have fewer forwards in flight, so they have memory for the delay: every device holds as many
    microbatches as the first device under 1F1B. Raises ScheduleError for more than one stage on a device.
    """
    check_stages_per_device("ZB-H1", stages_per_device, 1)
    # Without the weight gradients, this is the order of 1F1B.
    orders = [
        alternate_on(stage, INPUT_GRADIENT, [0] * n_microbatches, n_devices - stage - 1) for stage in range(n_devices)
    ]
    return Schedule("ZB-H1", n_microbatches, line(n_devices), _delay(orders))


def _delay(orders: Orders) -> Rows:
    """Add W to orders: after each I, device d does the oldest waiting W if more than d of them are waiting."""
    rows = []
    for device, order in enumerate(orders):
        row: list[Action] = []
        late: deque[Action] = deque()
        for action in order:
            row.append(action)
            if action.op == INPUT_GRADIENT:
                late.append(action._replace(op=WEIGHT_GRADIENT))
                if len(late) > device:
                    row.append(late.popleft())
        rows.append((*row, *late))
    return tuple(rows)


def zb_h2(n_devices: int, n_microbatches: int, stages_per_device: int = 1, times: Times | None = None) -> Schedule:
    """Return ZB-H2 (Qi et al. 2023): ZB-H1 with twice the memory, so that devices do not wait in the middle.

        device 0: F0 F1 F2 F3    I0 F4 I1 ...
        device 1:    F0 F1 F2 I0 F3 I1 F4 ...

    Device d begins with 2 (n_devices - d) - 1 forwards, and every device has at most 2 n_devices forwards in flight.
    Raises ScheduleError for more than one stage on a device.
    """
    check_stages_per_device("ZB-H2", stages_per_device, 1)
    warm_ups = [2 * (n_devices - stage) - 2 for stage in range(n_devices)]
    versions = [0] * n_microbatches
    orders = [alternate_on(stage, INPUT_GRADIENT, versions, warm_up) for stage, warm_up in enumerate(warm_ups)]
    homes = line(n_devices)
    used = take_times("ZB-H2", n_microbatches, homes, times)
    return replace(choose([fill(orders, n_microbatches, homes, used, 2 * n_devices)], used), name="ZB-H2")


def interleaved_zero_bubble(
    n_devices: int, n_microbatches: int, stages_per_device: int = 2, times: Times | None = None
) -> Schedule:
    """Return InterleavedZeroBubble, by torch's name: Interleaved1F1B with split backwards, whose W fill idle time.

    For each later device, a device warms up with one forward less than under Interleaved1F1B. No device has more
    forwards in flight than the first device has after its warm-up. Raises ScheduleError as `interleaved` does.
    """
    orders, size = order_interleaved("InterleavedZeroBubble", n_devices, n_microbatches, stages_per_device, split=True)
    homes = deal_in_turn(n_devices, stages_per_device)
    used = take_times("InterleavedZeroBubble", n_microbatches, homes, times)
    most = (stages_per_device - 1) * size + n_devices
    delayed = Schedule("", n_microbatches, homes, _delay(orders))
    found = choose([delayed, fill(orders, n_microbatches, homes, used, most)], used)
    return replace(found, name="InterleavedZeroBubble")


def zbv(n_devices: int, n_microbatches: int, stages_per_device: int = 2, times: Times | None = None) -> Schedule:
    """Return ZBVZeroBubble (Qi et al. 2024): two stages a device, there and back, with delayed weight gradients.

        device 0: 0F0 0F1     3F0 3I0 3F1 3I1 0I0 3W0 0I1 0W0 3W1 0W1      device 0 has stages 0 and 3
        device 1:     1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1      device 1 has stages 1 and 2

    Device 0 also has the last stage, so a microbatch's backward begins and ends there. Every device has at most 2
    n_devices forwards in flight, each half as long as under 1F1B: as much memory as the first device under 1F1B. Raises
    ScheduleError unless a device has two stages.
    """
    check_stages_per_device("ZBVZeroBubble", stages_per_device, 2)
    homes = go_there_and_back(n_devices)
    used, most = take_times("ZBVZeroBubble", n_microbatches, homes, times), 2 * n_devices
    # With few microbatches a list schedule is faster than the rule.
    rows = list_schedule(
        homes,
        n_microbatches,
        # Input gradients and forwards, for which other devices wait, come first; then the oldest microbatch, nearest to
        # its end.
        order=lambda a: (a.op == WEIGHT_GRADIENT, a.microbatch, -a.stage, a.op),
        most=lambda device: most,
        split=True,
    )
    listed = Schedule("", n_microbatches, homes, rows)
    orders = [order_there_and_back(n_devices, n_microbatches, device) for device in range(n_devices)]
    filled = fill(orders, n_microbatches, homes, used, most)
    at_once = None if filled is None else _follow_at_once(orders, n_microbatches, homes)
    return replace(choose([listed, filled, at_once], used), name="ZBVZeroBubble")


def order_there_and_back(
    n_devices: int, n_microbatches: int, device: int, more: int = 0, pairs: int = 0
) -> list[Action]:
    """Return the forwards and input gradients of a device under ZBVZeroBubble.

    Device d runs in this order:

    - 2 (n_devices - d) - 1 forwards of its first stage, and `more` additional ones
    - d times a forward of each stage, and `pairs` additional times
    - n_devices - d times a forward and an input gradient of its second stage
    - a forward and an input gradient of each stage in turn, to the end
    """
    stages = {"F0": device, "F1": 2 * n_devices - 1 - device}
    stages |= {"I1": stages["F1"], "I0": stages["F0"]}
    done = dict.fromkeys(stages, 0)
    after = {"F0": None, "F1": "F0", "I1": "F1", "I0": "I1"}
    row: list[Action] = []

    def put(*kinds: str) -> None:
        for kind in kinds:
            source = after[kind]
            if done[kind] < (n_microbatches if source is None else done[source]):
                row.append(Action(stages[kind], kind[0], done[kind]))
                done[kind] += 1

    put(*["F0"] * (2 * (n_devices - device) - 1 + more))
    put(*["F1", "F0"] * (device + pairs))
    put(*["F1", "I1"] * (n_devices - device))
    while len(row) < 4 * n_microbatches:
        put("F0", "I0", "F1", "I1")
    return row


def _follow_at_once(orders: Orders, n_microbatches: int, homes: Homes) -> Schedule:
    """Return the schedule in which each W follows its I at once, except near the end of each device's row.

    After its last forward, device d first runs 2 d input gradients in a row, because other devices wait for them.
    """
    rows = []
    for device, order in enumerate(orders):
        last = max(at for at, action in enumerate(order) if action.op == FORWARD)
        row: list[Action] = []
        late: list[Action] = []
        for at, action in enumerate(order):
            row.append(action)
            if action.op == INPUT_GRADIENT:
                late.append(action._replace(op=WEIGHT_GRADIENT))
                if at <= last + 1 or at > last + 1 + 2 * device:
                    row.append(late.pop(next(i for i, w in enumerate(late) if w.stage == action.stage)))
        late.sort(key=lambda w: (-w.stage, w.microbatch))
        rows.append((*row, *late))
    return Schedule("", n_microbatches, homes, tuple(rows))
