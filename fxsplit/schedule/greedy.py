"""List scheduling: what each device does next, decided in simulated time; any placement of stages will do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxsplit.errors import ScheduleError
from fxsplit.schedule.action import BACKWARD, FORWARD, INPUT_GRADIENT, RELEASES, WEIGHT_GRADIENT, Action
from fxsplit.schedule.schedule import Homes

UNIT = {FORWARD: 1.0, BACKWARD: 2.0, INPUT_GRADIENT: 1.0, WEIGHT_GRADIENT: 1.0}
"""How long each action takes in a schedule that knows no better."""

Rows = tuple[tuple[Action, ...], ...]


def list_schedule(
    homes: Homes,
    n_microbatches: int,
    order: Callable[[Action], Any],
    most: Callable[[int], float],
    split: bool = False,
) -> Rows:
    """Return each device's actions: whenever it is free it takes the first, by `order`, of what it could start then.

    `most(device)` is how many microbatches of a stage a device may hold activations of at once; `split` tells I and W
    apart. A stage's replicas take microbatches in turn, and what one does takes as many times as long as there are
    of them. Raises ScheduleError where nothing can go on because devices hold too much.
    """
    n_devices, last = 1 + max(d for home in homes for d in home), len(homes) - 1
    rows: list[list[Action]] = [[] for _ in range(n_devices)]
    free, held = [0.0] * n_devices, [0] * n_devices
    ready: list[dict[Action, float]] = [{} for _ in range(n_devices)]
    stale: set[int] = set()  # devices whose next action must be looked for again

    def action(stage: int, op: str, m: int) -> Action:
        return Action(stage, op, m, m % len(homes[stage]))

    def release(a: Action, now: float) -> None:
        device = homes[a.stage][a.replica]
        ready[device][a] = now
        stale.add(device)

    backward = INPUT_GRADIENT if split else BACKWARD
    for m in range(n_microbatches):
        release(action(0, FORWARD, m), 0.0)
    left = n_microbatches * len(homes) * (3 if split else 2)
    next_of: list[tuple[float, int, Any, Action] | None] = [None] * n_devices
    while left:
        for device in stale:
            next_of[device] = None
            able = [(a, t) for a, t in ready[device].items() if a.op != FORWARD or held[device] < most(device)]
            if able:
                start = max(free[device], min(t for _, t in able))
                next_of[device] = (start, device, *min((order(a), a) for a, t in able if t <= start))
        soonest = min((n for n in next_of if n is not None), key=lambda n: n[:2], default=None)
        if soonest is None:
            raise ScheduleError("nothing can go on: let devices hold more microbatches at once")
        start, device, _, a = soonest
        stale.clear()
        stale.add(device)
        del ready[device][a]
        rows[device].append(a)
        free[device] = now = start + UNIT[a.op] * len(homes[a.stage])
        held[device] += (a.op == FORWARD) - (a.op in RELEASES)
        left -= 1
        if a.op == FORWARD and a.stage < last:
            release(action(a.stage + 1, FORWARD, a.microbatch), now)
        if a.op == FORWARD and a.stage == last:
            release(action(a.stage, backward, a.microbatch), now)
        if a.op == backward and a.stage > 0:
            release(action(a.stage - 1, backward, a.microbatch), now)
        if a.op == INPUT_GRADIENT:
            release(action(a.stage, WEIGHT_GRADIENT, a.microbatch), now)
    return tuple(tuple(row) for row in rows)
