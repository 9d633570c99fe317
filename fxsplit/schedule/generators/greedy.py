"""List scheduling: choose each device's next action in simulated time, for any placement of stages.

It makes the schedules without a simple pattern: ZBVZeroBubble, Chimera, and 1F1B over replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from fxsplit.errors import ScheduleError
from fxsplit.schedule.action import BACKWARD, FORWARD, INPUT_GRADIENT, RELEASES, WEIGHT_GRADIENT, Action
from fxsplit.schedule.schedule import Homes

UNIT = {FORWARD: 1.0, BACKWARD: 2.0, INPUT_GRADIENT: 1.0, WEIGHT_GRADIENT: 1.0}
"""The simulated time of each action if no times are known: a backward counts as two forwards."""

Rows = tuple[tuple[Action, ...], ...]


def list_schedule(
    homes: Homes,
    n_microbatches: int,
    order: Callable[[Action], Any],
    most: Callable[[int], float],
    split: bool = False,
) -> Rows:
    """Return each device's actions in the order that a list scheduler finds.

    Of all actions that a free device could start now, it takes the smallest by `order`. `most(device)` limits how many
    microbatches' activations a device may hold. With `split`, a backward is an I and a W. Replicas of a stage take
    microbatches in turn. An action of a stage with r replicas is assumed to take r times as long, because plans
    replicate the stages with the most work. Raises ScheduleError if the limits on activations block all devices.
    """
    n_devices, last = 1 + max(d for home in homes for d in home), len(homes) - 1
    rows: list[list[Action]] = [[] for _ in range(n_devices)]
    free, held = [0.0] * n_devices, [0] * n_devices
    # When an action could start, and its place by `order`. The action itself breaks ties, so that the result does not
    # depend on the order of dicts.
    ready: list[dict[Action, tuple[float, Any]]] = [{} for _ in range(n_devices)]
    # Most actions do not affect most devices, so cache the choice of each device that is not stale.
    stale: set[int] = set()

    def release(stage: int, op: str, m: int, now: float) -> None:
        a = Action(stage, op, m, m % len(homes[stage]))
        device = homes[stage][a.replica]
        ready[device][a] = now, (order(a), a)
        stale.add(device)

    # The gradient that a stage sends back: with split backwards, only the gradient of its inputs.
    backward = INPUT_GRADIENT if split else BACKWARD
    for m in range(n_microbatches):
        release(0, FORWARD, m, 0.0)
    next_of: list[tuple[float, int, Any, Action] | None] = [None] * n_devices
    while any(ready):
        for device in stale:
            next_of[device] = None
            # Only a forward takes memory. A device at its limit waits for its own backwards.
            able = [found for a, found in ready[device].items() if a.op != FORWARD or held[device] < most(device)]
            if able:
                start = max(free[device], min(able, key=itemgetter(0))[0])
                next_of[device] = (start, device, *min(place for t, place in able if t <= start))
        # The device that can start first acts, so that simulated time never runs backwards.
        soonest = min((n for n in next_of if n is not None), key=lambda n: n[:2], default=None)
        if soonest is None:
            raise ScheduleError("no device can go on: let devices hold more microbatches at once")
        start, device, _, a = soonest
        stale = {device}
        del ready[device][a]
        rows[device].append(a)
        free[device] = now = start + UNIT[a.op] * len(homes[a.stage])
        # True counts as 1: a forward takes memory, and a microbatch's last action frees it.
        held[device] += (a.op == FORWARD) - (a.op in RELEASES)
        if a.op == FORWARD and a.stage < last:
            release(a.stage + 1, FORWARD, a.microbatch, now)
        if a.op == FORWARD and a.stage == last:
            release(a.stage, backward, a.microbatch, now)
        if a.op == backward and a.stage > 0:
            release(a.stage - 1, backward, a.microbatch, now)
        if a.op == INPUT_GRADIENT:
            release(a.stage, WEIGHT_GRADIENT, a.microbatch, now)
    return tuple(tuple(row) for row in rows)
