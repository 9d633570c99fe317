"""Verify: a schedule that does everything once, in an order that the data allows, without waiting for ever."""

from __future__ import annotations

from collections import Counter

from fxsplit.errors import ScheduleError
from fxsplit.schedule.action import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECV_B,
    RECV_F,
    REDUCE,
    RELEASES,
    SEND_B,
    SEND_F,
    STEP,
    TRANSFERS,
    WEIGHT_GRADIENT,
    Action,
)
from fxsplit.schedule.flow import needs, plain
from fxsplit.schedule.schedule import Schedule


def verify(schedule: Schedule) -> None:
    """Raise ScheduleError for a wrong schedule, naming device, position and action, and the reason.

    Every microbatch passes every stage once, forward and backward (B, or I and W), on the replica that forwarded it;
    what an action needs is not done later on the same device; transfers, where they are written out, come in pairs;
    nothing waits for ever; weights are used in versions that exist, and a backward uses its forward's.
    """
    _places(schedule)
    _completeness(schedule)
    if schedule.transfers:
        _pairs(schedule)
    _order(schedule)
    _versions(schedule)


def _places(schedule: Schedule) -> None:
    """Check that every action stands where its stage lives, and once."""
    seen: set[Action] = set()
    for device, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            where = schedule.at(device, position)
            if not 0 <= action.stage < schedule.n_stages:
                raise ScheduleError(f"{where}: no such stage; there are {schedule.n_stages}")
            if action.op != REDUCE and not 0 <= action.microbatch < schedule.n_microbatches:
                raise ScheduleError(f"{where}: no such microbatch; there are {schedule.n_microbatches}")
            homes = schedule.homes[action.stage]
            if action.replica >= len(homes):
                raise ScheduleError(f"{where}: stage {action.stage} has {len(homes)} replicas")
            if homes[action.replica] != device:
                raise ScheduleError(f"{where}: stage {action.stage} lives on device {homes[action.replica]}")
            if plain(action) in seen:
                raise ScheduleError(f"{where}: done twice")
            seen.add(plain(action))


def _completeness(schedule: Schedule) -> None:
    """Check that every microbatch passes every stage, forward and backward, on one replica."""
    done: dict[tuple[int, int], Counter[str]] = {}
    for device, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if action.op in (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT):
                ops = done.setdefault((action.stage, action.microbatch), Counter())
                if ops[action.op]:
                    raise ScheduleError(f"{schedule.at(device, position)}: done on two replicas")
                ops[action.op] += 1
                if action.replica != schedule.replica_of.get((action.stage, action.microbatch), action.replica):
                    raise ScheduleError(f"{schedule.at(device, position)}: another replica forwards this microbatch")
    for stage in range(schedule.n_stages):
        for m in range(schedule.n_microbatches):
            ops = done.get((stage, m), Counter())
            wanted = [FORWARD]
            wanted += [INPUT_GRADIENT, WEIGHT_GRADIENT] if ops[INPUT_GRADIENT] or ops[WEIGHT_GRADIENT] else [BACKWARD]
            for op in wanted:
                if not ops[op]:
                    raise ScheduleError(f"{schedule.name}: {Action(stage, op, m)} is never done")
            if ops[BACKWARD] and ops[INPUT_GRADIENT]:
                raise ScheduleError(f"{schedule.name}: {Action(stage, BACKWARD, m)} is done whole, and also as I and W")


def _pairs(schedule: Schedule) -> None:
    """Check that exactly what crosses between devices is sent and received."""
    wanted: set[Action] = set()
    for (stage, m), replica in schedule.replica_of.items():
        if stage == 0 or schedule.device_of(stage - 1, m) == schedule.device_of(stage, m):
            continue
        before = schedule.replica_of[stage - 1, m]
        wanted |= {Action(stage - 1, SEND_F, m, before), Action(stage, RECV_F, m, replica)}
        wanted |= {Action(stage, SEND_B, m, replica), Action(stage - 1, RECV_B, m, before)}
    for device, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if action.op not in TRANSFERS:
                continue
            if plain(action) not in wanted:
                raise ScheduleError(f"{schedule.at(device, position)}: nothing crosses between devices there")
            wanted.discard(plain(action))
    if wanted:
        missing = min(wanted)
        raise ScheduleError(f"{schedule.name}: {missing} is never done, and its counterpart waits (unpaired transfer)")


def _order(schedule: Schedule) -> None:
    """Check that nothing stands before what it needs, on its own device or around a circle of devices."""
    place = {plain(a): (d, i) for d, row in enumerate(schedule.actions) for i, a in enumerate(row)}
    for device, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            for need, _ in needs(schedule, action):
                other, at = place.get(need, (-1, -1))
                if other < 0:
                    raise ScheduleError(f"{schedule.at(device, position)}: needs {need}, which is never done")
                if other == device and at > position:
                    raise ScheduleError(f"{schedule.at(device, position)}: stands before {need}, which it needs")
    stuck = first_stuck(schedule)
    if stuck is not None:
        device, position, need = stuck
        raise ScheduleError(f"{schedule.at(device, position)}: deadlock, it waits for {need}, which never comes")


def first_stuck(schedule: Schedule) -> tuple[int, int, Action] | None:
    """Return the first device and position that can never go on, and what it waits for; None where all get done."""
    done: set[Action] = set()
    at = [0] * schedule.n_devices
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(schedule.actions):
            while at[device] < len(row) and all(n in done for n, _ in needs(schedule, row[at[device]])):
                done.add(plain(row[at[device]]))
                at[device] += 1
                moved = True
    for device, row in enumerate(schedule.actions):
        if at[device] < len(row):
            need = next(n for n, _ in needs(schedule, row[at[device]]) if n not in done)
            return device, at[device], need
    return None


def _versions(schedule: Schedule) -> None:
    """Check that weights are used in versions that exist, by backward as by forward, and that steps count up."""
    for device, row in enumerate(schedule.actions):
        made: dict[tuple[int, int], int] = {}
        used: dict[tuple[int, int], int] = {}
        for position, action in enumerate(row):
            place, where = (action.stage, action.replica), schedule.at(device, position)
            newest = made.get(place, 0)
            if action.op == STEP:
                if schedule.synchronous and any(a.op in RELEASES and a.stage == action.stage for a in row[position:]):
                    raise ScheduleError(f"{where}: steps before all microbatches are done, in a synchronous schedule")
                if action.version != newest + 1:
                    raise ScheduleError(f"{where}: makes version {action.version} after version {newest}")
                made[place] = action.version
            elif action.op == FORWARD:
                if action.version > newest:
                    raise ScheduleError(f"{where}: uses version {action.version}, and the newest is {newest}")
                used[action.stage, action.microbatch] = action.version
            elif action.op in (BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT):
                forward = used.get((action.stage, action.microbatch), action.version)
                if action.version != forward:
                    raise ScheduleError(f"{where}: its forward used version {forward}")
