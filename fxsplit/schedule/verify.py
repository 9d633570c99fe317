"""Verify that a schedule runs every action once, in an order that the data flow allows, without deadlock.

Generated schedules, schedules from files and users' own schedules are all verified before they run.
"""

from __future__ import annotations

from collections import Counter

from fxsplit.errors import ScheduleError
from fxsplit.schedule.action import (
    BACKWARD,
    COMPUTES,
    FORWARD,
    GRADIENTS,
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
    """Raise ScheduleError for an illegal schedule, with device, position, action and reason.

    A legal schedule satisfies all of these:

    - every action is on the device of its stage, and occurs once
    - every microbatch passes every stage forward and, in training, backward (B, or I and W), on one replica of the
      stage
    - transfers, if written out, come in pairs, and only between stages on different devices
    - an action comes after the actions that it needs, and devices never wait for each other in a cycle
    - weights are used in versions that exist, and a backward uses the version of its forward
    """
    # Keep this order: the last two checks look up actions that the first ones have found to exist.
    _check_places(schedule)
    _check_completeness(schedule)
    if schedule.transfers:
        _check_pairs(schedule)
    _check_order(schedule)
    _check_versions(schedule)


def _check_places(schedule: Schedule) -> None:
    """Raise unless every action is on the device of its stage, and occurs once."""
    seen: set[Action] = set()
    for device, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            where = schedule.at(device, position)
            if not 0 <= action.stage < schedule.n_stages:
                raise ScheduleError(f"{where}: no such stage; there are {schedule.n_stages}")
            # A reduction covers all microbatches and names none.
            if action.op != REDUCE and not 0 <= action.microbatch < schedule.n_microbatches:
                raise ScheduleError(f"{where}: no such microbatch; there are {schedule.n_microbatches}")
            homes = schedule.homes[action.stage]
            if action.replica >= len(homes):
                raise ScheduleError(f"{where}: stage {action.stage} has {len(homes)} replicas")
            if homes[action.replica] != device:
                raise ScheduleError(f"{where}: stage {action.stage} lives on device {homes[action.replica]}")
            # With another weight version it is still the same work.
            if drop_version(action) in seen:
                raise ScheduleError(f"{where}: done twice")
            after = row[position + 1].op if position + 1 < len(row) else ""
            if action in schedule.paired and (action.op != FORWARD or after not in GRADIENTS):
                raise ScheduleError(f"{where}: it runs together with the next action, which must be a backward")
            seen.add(drop_version(action))


def _check_completeness(schedule: Schedule) -> None:
    """Raise unless every microbatch passes every stage, forward and in training backward, on one replica."""
    done: dict[tuple[int, int], Counter[str]] = {}
    for device, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if action.op in COMPUTES:
                ops = done.setdefault((action.stage, action.microbatch), Counter())
                # _check_places finds a duplicate on one device; this is a duplicate on two replicas.
                if ops[action.op]:
                    raise ScheduleError(f"{schedule.at(device, position)}: done on two replicas")
                ops[action.op] += 1
                if action.replica != schedule.replica_of.get((action.stage, action.microbatch), action.replica):
                    raise ScheduleError(f"{schedule.at(device, position)}: another replica forwards this microbatch")
    for stage in range(schedule.n_stages):
        for m in range(schedule.n_microbatches):
            ops = done.get((stage, m), Counter())
            # Half of a split backward requires the other half. Without either, a full backward is required.
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
    """Raise unless the sends and receives are exactly the crossings between devices."""
    wanted = {a for row in with_transfers(schedule).actions for a in row if a.op in TRANSFERS}
    for device, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if action.op not in TRANSFERS:
                continue
            if drop_version(action) not in wanted:
                raise ScheduleError(f"{schedule.at(device, position)}: nothing crosses between devices there")
            wanted.discard(drop_version(action))
    if wanted:
        # Take the smallest, so that the error is deterministic.
        missing = min(wanted)
        raise ScheduleError(f"{schedule.name}: {missing} is never done, and its counterpart waits (unpaired transfer)")


def _check_order(schedule: Schedule) -> None:
    """Raise unless every action can start after the actions before it, on its own device and on other devices."""
    place = {drop_version(a): (d, i) for d, row in enumerate(schedule.actions) for i, a in enumerate(row)}
    for device, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            for need, _ in find_needs(schedule, action):
                other, at = place.get(need, (-1, -1))
                if other < 0:
                    raise ScheduleError(f"{schedule.at(device, position)}: needs {need}, which is never done")
                # Across devices the order may depend on waiting, which refuse_deadlock checks.
                if other == device and at > position:
                    raise ScheduleError(f"{schedule.at(device, position)}: comes before {need}, which it needs")
    refuse_deadlock(schedule)


def refuse_deadlock(schedule: Schedule) -> None:
    """Raise ScheduleError for the first device in a deadlock, with its position and the action it waits for."""
    # Run every action that can run, in turns. Devices that do not reach their end wait for each other.
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
    """Raise unless every used weight version exists, backwards use their forwards' versions, and steps count up."""
    for device, row in enumerate(schedule.actions):
        made: dict[tuple[int, int], int] = {}
        used: dict[tuple[int, int], int] = {}
        for position, action in enumerate(row):
            place, where = (action.stage, action.replica), schedule.at(device, position)
            newest = made.get(place, 0)
            if action.op == STEP:
                # A step in the middle would give later microbatches other weights than earlier ones.
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
                # A schedule of only backwards has no forward to compare with.
                forward = used.get((action.stage, action.microbatch), action.version)
                if action.version != forward:
                    raise ScheduleError(f"{where}: its forward used version {forward}")
