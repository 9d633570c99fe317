"""Verify: check that a schedule does everything once, in an order that the data allows, without waiting for ever.

Generated schedules, schedules read from files and schedules of users all pass here before they run.
"""

from __future__ import annotations

from collections import Counter

from fxsplit.errors import ScheduleError
from fxsplit.schedule.action import (
    BACKWARD,
    COMPUTES,
    FORWARD,
    INPUT_GRADIENT,
    REDUCE,
    RELEASES,
    STEP,
    TRANSFERS,
    WEIGHT_GRADIENT,
    Action,
)
from fxsplit.schedule.flow import drop_version, find_needs, with_transfers
from fxsplit.schedule.schedule import Schedule


def verify(schedule: Schedule) -> None:
    """Raise ScheduleError for a wrong schedule, naming device, position and action, and the reason.

    A schedule is right if all of these hold:

    - every action stands on the device of its stage, and once;
    - every microbatch passes every stage forward and, in training, backward (B, or I and W), on one replica of it;
    - transfers, where they are written out, come in pairs, and only where stages are on different devices;
    - what an action needs stands before it on its device, and devices never wait for each other in a circle;
    - weights are used in versions that exist, and a backward uses the version of its forward.
    """
    # In this order, since each check relies on those before it: the last two look up actions that must exist.
    _check_places(schedule)
    _check_completeness(schedule)
    if schedule.transfers:
        _check_pairs(schedule)
    _check_order(schedule)
    _check_versions(schedule)


def _check_places(schedule: Schedule) -> None:
    """Raise unless every action stands where its stage lives, and once."""
    seen: set[Action] = set()
    for device, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            where = schedule.at(device, position)
            if not 0 <= action.stage < schedule.n_stages:
                raise ScheduleError(f"{where}: no such stage; there are {schedule.n_stages}")
            # A sum over replicas is for all microbatches, and names none.
            if action.op != REDUCE and not 0 <= action.microbatch < schedule.n_microbatches:
                raise ScheduleError(f"{where}: no such microbatch; there are {schedule.n_microbatches}")
            homes = schedule.homes[action.stage]
            if action.replica >= len(homes):
                raise ScheduleError(f"{where}: stage {action.stage} has {len(homes)} replicas")
            if homes[action.replica] != device:
                raise ScheduleError(f"{where}: stage {action.stage} lives on device {homes[action.replica]}")
            # The same action with another weight version is the same work, done twice.
            if drop_version(action) in seen:
                raise ScheduleError(f"{where}: done twice")
            seen.add(drop_version(action))


def _check_completeness(schedule: Schedule) -> None:
    """Raise unless every microbatch passes every stage, forward and perhaps backward, on one replica."""
    done: dict[tuple[int, int], Counter[str]] = {}
    for device, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if action.op in COMPUTES:
                ops = done.setdefault((action.stage, action.microbatch), Counter())
                # _check_places has found an action twice on one device; here it is on two of the stage's replicas.
                if ops[action.op]:
                    raise ScheduleError(f"{schedule.at(device, position)}: done on two replicas")
                ops[action.op] += 1
                if action.replica != schedule.replica_of.get((action.stage, action.microbatch), action.replica):
                    raise ScheduleError(f"{schedule.at(device, position)}: another replica forwards this microbatch")
    for stage in range(schedule.n_stages):
        for m in range(schedule.n_microbatches):
            ops = done.get((stage, m), Counter())
            # One half of a divided backward asks for the other half; with neither, a full backward is missing.
            wanted = [FORWARD]
            if schedule.trains:
                halved = ops[INPUT_GRADIENT] or ops[WEIGHT_GRADIENT]
                wanted += [INPUT_GRADIENT, WEIGHT_GRADIENT] if halved else [BACKWARD]
            for op in wanted:
                if not ops[op]:
                    raise ScheduleError(f"{schedule.name}: {Action(stage, op, m)} is never done")
            if ops[BACKWARD] and ops[INPUT_GRADIENT]:
                raise ScheduleError(f"{schedule.name}: {Action(stage, BACKWARD, m)} is done whole, and also as I and W")


def _check_pairs(schedule: Schedule) -> None:
    """Raise unless exactly what crosses between devices is sent and received."""
    wanted = {a for row in with_transfers(schedule).actions for a in row if a.op in TRANSFERS}
    for device, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if action.op not in TRANSFERS:
                continue
            if drop_version(action) not in wanted:
                raise ScheduleError(f"{schedule.at(device, position)}: nothing crosses between devices there")
            wanted.discard(drop_version(action))
    if wanted:
        # The first by stage, so that the same error comes each time.
        missing = min(wanted)
        raise ScheduleError(f"{schedule.name}: {missing} is never done, and its counterpart waits (unpaired transfer)")


def _check_order(schedule: Schedule) -> None:
    """Raise unless every action can start once those before it are done, on its own device and on all others."""
    place = {drop_version(a): (d, i) for d, row in enumerate(schedule.actions) for i, a in enumerate(row)}
    for device, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            for need, _ in find_needs(schedule, action):
                other, at = place.get(need, (-1, -1))
                if other < 0:
                    raise ScheduleError(f"{schedule.at(device, position)}: needs {need}, which is never done")
                # On another device the order is a matter of waiting, which refuse_deadlock looks at.
                if other == device and at > position:
                    raise ScheduleError(f"{schedule.at(device, position)}: stands before {need}, which it needs")
    refuse_deadlock(schedule)


def refuse_deadlock(schedule: Schedule) -> None:
    """Raise ScheduleError for the first device that can never go on, naming its position and what it waits for."""
    # Do all that can be done, turn by turn. Devices that are not at their end then wait for each other.
    done: set[Action] = set()
    at = [0] * schedule.n_devices
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(schedule.actions):
            while at[device] < len(row) and all(n in done for n, _ in find_needs(schedule, row[at[device]])):
                done.add(drop_version(row[at[device]]))
                at[device] += 1
                moved = True
    for device, row in enumerate(schedule.actions):
        if at[device] < len(row):
            need = next(n for n, _ in find_needs(schedule, row[at[device]]) if n not in done)
            where = schedule.at(device, at[device])
            raise ScheduleError(f"{where}: deadlock, it waits for {need}, which never comes")


def _check_versions(schedule: Schedule) -> None:
    """Raise unless weights are used in versions that exist, backwards use their forwards', and steps count up."""
    for device, row in enumerate(schedule.actions):
        made: dict[tuple[int, int], int] = {}
        used: dict[tuple[int, int], int] = {}
        for position, action in enumerate(row):
            place, where = (action.stage, action.replica), schedule.at(device, position)
            newest = made.get(place, 0)
            if action.op == STEP:
                # A step in the middle would let later microbatches see other weights than earlier ones.
                if schedule.synchronous and any(a.op in RELEASES and a.stage == action.stage for a in row[position:]):
                    raise ScheduleError(f"{where}: steps before all microbatches are done, in a synchronous schedule")
                if action.version != newest + 1:
                    raise ScheduleError(f"{where}: makes version {action.version} after version {newest}")
                made[place] = action.version
            elif action.op == FORWARD:
                if action.version > newest:
                    raise ScheduleError(f"{where}: uses version {action.version}, and the newest is {newest}")
                used[action.stage, action.microbatch] = action.version
            elif action.op in COMPUTES:
                # A schedule of backwards alone has no forward to compare with.
                forward = used.get((action.stage, action.microbatch), action.version)
                if action.version != forward:
                    raise ScheduleError(f"{where}: its forward used version {forward}")
