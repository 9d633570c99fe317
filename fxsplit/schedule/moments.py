"""From a schedule to the moments of its stages: the contents of a stage's memory during and after each action.

The fields of a `Moment` are explained in ir/facts/memory/moments.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from fxsplit.ir.facts.memory.moments import Moment, Moments, keep_largest
from fxsplit.schedule.action import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    INPUT_GRADIENT,
    RELEASES,
    STEP,
    WEIGHT_GRADIENT,
    Action,
)
from fxsplit.schedule.outstanding import list_outstanding
from fxsplit.schedule.schedule import Schedule

DURING = {
    FORWARD: "forward_bytes",
    BACKWARD: "whole_bytes",
    INPUT_GRADIENT: "early_bytes",
    WEIGHT_GRADIENT: "late_bytes",
    STEP: "step_bytes",
}
"""The stage's figure for the peak during each action. A sum over replicas needs no additional memory."""


class ActionMoment(NamedTuple):
    """One action of a device, and the memory contents of each of the device's stages during and after the action."""

    action: Action
    during: dict[int, Moment]
    after: dict[int, Moment]


def follow_device(schedule: Schedule, device: int, outstanding: list[tuple[Action, ...]]) -> Iterator[ActionMoment]:
    """Yield a device's actions with its stages' moments; `outstanding` are the messages held at each action."""
    # Sums of gradients exist from the first backward of a step to the optimizer step.
    first = Moment(sums=1 - schedule.trains)
    held = {stage: first for stage, home in enumerate(schedule.homes) if device in home}
    # The number of weight versions after the last action of each stage and replica.
    seen: dict[tuple[int, int], int] = {}
    rows = zip(schedule.actions[device], schedule.versions(device), outstanding, strict=True)
    for action, versions, waiting in rows:
        values = Counter(made.stage for made in waiting if made.op == FORWARD)
        gradients = Counter(made.stage for made in waiting if made.op != FORWARD)
        # Messages sent earlier may have been received meanwhile.
        held = {s: m._replace(sent=values[s], sent_gradients=gradients[s]) for s, m in held.items()}
        own = held[action.stage]
        # Before and after an action, its microbatch counts with the others; during the action it counts separately.
        if action.op == WEIGHT_GRADIENT:
            own = own._replace(halfway=own.halfway - 1)
        elif (action.op in RELEASES or action.op == INPUT_GRADIENT) and schedule.trains:
            own = own._replace(resting=own.resting - 1)
        # Reductions and transfers need no additional memory.
        during = {**held, action.stage: own._replace(during=DURING.get(action.op, ""))}
        one = action.stage, action.replica
        further = versions - seen.get(one, 1)
        # A step writes to new memory if its old weights are still needed, and consumes the sums of gradients.
        if action.op == STEP:
            during[action.stage] = during[action.stage]._replace(versions=own.versions + max(further, 0))
            own = own._replace(sums=0)
        elif action.op == BACKWARD and not own.sums:
            during[action.stage] = during[action.stage]._replace(during="first_bytes")
            own = own._replace(sums=1)
        elif action.op == INPUT_GRADIENT:
            # The order in which the halves of a split backward make the sums is not tracked: assume all sums.
            during[action.stage] = during[action.stage]._replace(sums=1)
            own = own._replace(sums=1)
        if action.op == FORWARD and schedule.trains:
            own = own._replace(resting=own.resting + 1)
        if action.op == INPUT_GRADIENT:
            own = own._replace(halfway=own.halfway + 1)
        if action.op == FORWARD:
            own = own._replace(sent=own.sent + 1)
        elif action.op in GRADIENTS:
            own = own._replace(sent_gradients=own.sent_gradients + 1)
        own = own._replace(versions=own.versions + further)
        seen[one] = versions
        held = {**held, action.stage: own}
        yield ActionMoment(action, during, held)


def list_moments(schedule: Schedule) -> tuple[Moments, ...]:
    """Return the moments at which each stage may hold most, over all replicas of the stage."""
    found: list[set[Moment]] = [set() for _ in schedule.homes]
    for device, outstanding in enumerate(list_outstanding(schedule)):
        for action, during, after in follow_device(schedule, device, outstanding):
            # During an action the device's other stages do not change, except that their messages are received.
            found[action.stage] |= {during[action.stage], after[action.stage]}
    return tuple(keep_largest(moments or {Moment()}) for moments in found)
