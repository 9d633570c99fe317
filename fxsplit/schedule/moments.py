"""From a schedule to the moments of its stages: what of everything a stage holds while its device does an action."""

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
"""Which figure of a stage says what is held, at most, while an action runs; a sum over replicas takes no more."""


class Turn(NamedTuple):
    """One action of a device: what each of the device's stages holds while it runs, and what right behind it."""

    action: Action
    during: dict[int, Moment]
    behind: dict[int, Moment]


def follow_device(schedule: Schedule, device: int, outstanding: list[tuple[Action, ...]]) -> Iterator[Turn]:
    """Yield each action of a device; `outstanding` is what may wait to be taken when each begins."""
    # Before the first backward there are no sums of gradients, nor behind a step.
    first = Moment(sums=1 - schedule.trains)
    held = {stage: first for stage, home in enumerate(schedule.homes) if device in home}
    # The versions of the weights after the last action of each stage and replica.
    seen: dict[tuple[int, int], int] = {}
    rows = zip(schedule.actions[device], schedule.versions(device), outstanding, strict=True)
    for action, versions, waiting in rows:
        values = Counter(made.stage for made in waiting if made.op == FORWARD)
        gradients = Counter(made.stage for made in waiting if made.op != FORWARD)
        # What was sent earlier may have been taken meanwhile.
        held = {s: m._replace(sent=values[s], sent_gradients=gradients[s]) for s, m in held.items()}
        own = held[action.stage]
        # The microbatch in hand is among the others before and behind.
        if action.op == WEIGHT_GRADIENT:
            own = own._replace(halfway=own.halfway - 1)
        elif (action.op in RELEASES or action.op == INPUT_GRADIENT) and schedule.trains:
            own = own._replace(resting=own.resting - 1)
        # Sums over replicas and transfers take no memory of their own.
        during = {**held, action.stage: own._replace(during=DURING.get(action.op, ""))}
        one = action.stage, action.replica
        further = versions - seen.get(one, 1)
        # A step writes to other memory where its weights are still to be read, and takes the sums.
        if action.op == STEP:
            during[action.stage] = during[action.stage]._replace(versions=own.versions + max(further, 0))
            own = own._replace(sums=0)
        elif action.op == BACKWARD and not own.sums:
            during[action.stage] = during[action.stage]._replace(during="first_bytes")
            own = own._replace(sums=1)
        elif action.op == INPUT_GRADIENT:
            # What of a divided backward makes which sums is not followed.
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
        yield Turn(action, during, held)


def list_moments(schedule: Schedule) -> tuple[Moments, ...]:
    """Return the moments in which each stage may hold most, of all replicas of a stage."""
    found: list[set[Moment]] = [set() for _ in schedule.homes]
    for device, outstanding in enumerate(list_outstanding(schedule)):
        for action, during, behind in follow_device(schedule, device, outstanding):
            # What other stages hold does not change then, but for what is taken from them.
            found[action.stage] |= {during[action.stage], behind[action.stage]}
    return tuple(keep_largest(moments or {Moment()}) for moments in found)
