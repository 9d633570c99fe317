"""Moves: which devices a stage may take after the stages before it.

A *configuration* says which devices are in use. A *move* leads from one configuration to another, by the devices of one
stage. On two devices in their order the configurations are 0 (none used), 1 (the first) and 2 (both). The moves are
0 -> 1 and 1 -> 2, and where a stage may have replicas also 0 -> 2. A plan is a walk from 0 to a final configuration.
A move without devices leaves a device idle: 0 -> 1 by such a move, and then 1 -> 2, is a plan on the second device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from fxsplit.errors import PlanError
from fxsplit.ir.facts.given.machine import Machine

MAX_CONFIGURATIONS = 4096
"""More configurations than these are refused: the search keeps a table of states for each."""


@dataclass(frozen=True)
class Move:
    """One stage's choice of devices, from a configuration to another; without devices the next device stays idle.

    `first` and `last` say that no stage comes before or after. `rank` is the number of the stage where that is known
    beforehand, else -1. With `recompute` the stage keeps no activations between forward and backward, and runs forward
    again. `near_before` and `near_after` tell whether the stages before and after are on the neighbouring devices,
    where that makes a difference: behind a device that is idle the link may be slower.
    """

    source: int
    target: int
    devices: tuple[int, ...]
    first: bool
    last: bool
    rank: int = -1
    recompute: bool = False
    near_before: bool = True
    near_after: bool = True


@dataclass(frozen=True)
class Moves:
    """All moves over the devices of a machine.

    A move that enters a configuration comes before any that leaves it. `used` are the devices that each configuration
    has used; configuration 0 has used none. A plan may end in the configurations of `final`. `n_stages` is how many
    stages a plan has, where that is known beforehand, else 0.
    """

    moves: tuple[Move, ...]
    used: tuple[tuple[int, ...], ...]
    final: frozenset[int]
    n_stages: int = 0

    @cached_property
    def number(self) -> dict[Move, int]:
        """The place of each move among all."""
        return {move: i for i, move in enumerate(self.moves)}


@lru_cache(maxsize=128)  # a search over schedules asks for the same moves again and again
def list_moves(
    machine: Machine,
    replicated: bool,
    idle: str,
    free: bool,
    n_stages: int | None,
    recompute: str = "never",
    named: frozenset[int] = frozenset(),
) -> Moves:
    """Return the moves over a machine's devices.

    In the order of the machine, each stage takes the next device, or several where stages may be `replicated`. In
    `free` order it takes any device that is left. `idle` tells which devices may be left idle: "none", the "last" ones,
    which is enough where devices are alike, or "any"; in a free order all but "none" mean any. With `n_stages` a
    configuration also counts stages, since what a stage must hold depends on its number, and only plans of so many
    stages end. `recompute` is "never", "always", or "auto" for as each stage sees fit. Devices in `named` are like no
    others, since something is pinned to them. Raises PlanError for a free order over unequal links, or over too many
    unlike devices.
    """
    if free:
        found = _free(machine, idle == "none", named)
    else:
        found = _leaving_out(machine, replicated, named) if idle == "any" else _in_order(machine, replicated, idle)
    ways = {"never": (False,), "always": (True,), "auto": (False, True)}[recompute]
    # An idle device computes nothing, and so nothing twice.
    moves = [replace(m, recompute=way) for m in found.moves for way in (ways if m.devices else (False,))]
    found = replace(found, moves=tuple(moves))
    return found if n_stages is None else _counted(found, n_stages)


def _in_order(machine: Machine, replicated: bool, idle: str) -> Moves:
    """Return moves that take the devices as they stand; configuration q has used the first q devices."""
    count = len(machine)
    moves = [
        Move(a, b, tuple(range(a, b)), a == 0, b == count)
        for a in range(count)
        for b in _list_ends(machine, a, replicated)
    ]
    used = tuple(tuple(range(q)) for q in range(count + 1))
    return Moves(tuple(moves), used, frozenset([count] if idle == "none" else range(1, count + 1)))


def _list_ends(machine: Machine, begin: int, replicated: bool) -> list[int]:
    """Return behind which devices a stage may end that begins with device `begin`."""
    ends = range(begin + 1, len(machine) + 1 if replicated else begin + 2)
    # A host takes other times than accelerators for each node, so it cannot share a stage with them.
    return [b for b in ends if b == begin + 1 or not any(d.host for d in machine.devices[begin:b])]


def _leaving_out(machine: Machine, replicated: bool, named: frozenset[int]) -> Moves:
    """Return moves that take the devices as they stand, or leave some of them out, but for those in `named`.

    Configuration (q, where) has used, or left out, the first q devices. `where` is "none" before the first stage,
    "near" where the stage before is on device q - 1, and "far" where it is further away. A stage ends "far" by leaving
    out the next device too, since what it pays for sending depends on that. Where all links are equal, `where` is
    "none" throughout: no stage pays more.
    """
    count = len(machine)
    apart = len(set(machine.links)) > 1
    kinds = ("none", "near", "far") if apart else ("none",)
    # A stage was on an earlier device, with an idle one behind it if it is far away.
    least = {"none": 0, "near": 1, "far": 2}
    reached = [(q, where) for q in range(count + 1) for where in kinds if q >= least[where]]
    # Behind the last device there is one configuration, in which a plan ends.
    reached = [c for c in reached if c[0] < count or c[1] == ("near" if apart else "none")]
    number = {c: i for i, c in enumerate(reached)}
    moves = []
    for (q, where), source in number.items():
        if q == count:
            continue
        for b in _list_ends(machine, q, replicated):
            ends = [("near", b), ("far", b + 1)] if apart and b < count - 1 and b not in named else [("near", b)]
            for how, end in ends:
                target = number[end, how if apart else "none"]
                first, near = where == "none" and (apart or q == 0), where != "far"
                moves.append(
                    Move(
                        source,
                        target,
                        tuple(range(q, b)),
                        first,
                        b == count,
                        near_before=near,
                        near_after=how == "near",
                    )
                )
        # A stage that ends near has its next stage on device q, which is not left out then.
        if where != "near" and q + 1 < count and q not in named:
            moves.append(Move(source, number[q + 1, where], (), False, False))
    used = tuple(tuple(range(q)) for q, _ in reached)
    final = [i for (q, where), i in number.items() if q > 0 and where == ("near" if apart else "none")]
    return Moves(tuple(moves), used, frozenset(final))


def _free(machine: Machine, use_all: bool, named: frozenset[int]) -> Moves:
    """Return moves that take devices in any order; equal devices are one type, and a configuration counts each type."""
    # What a stage pays for traffic must not depend on which device its neighbour has.
    if len(set(machine.links)) > 1:
        raise PlanError(
            "a free order of devices needs equal links between all of them: state each device's own link as "
            "Device(bytes_per_s=), or keep the machine's order"
        )
    # Equal devices need not be told apart, which keeps the configurations few.
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i, d in enumerate(machine.devices):
        kinds.setdefault((d.memory_bytes, d.speed, d.bytes_per_s, d.host, i if i in named else None), []).append(i)
    members = list(kinds.values())
    # Sorted by how many devices are used, so that moves enter a configuration before any leaves it.
    counts = sorted(itertools.product(*(range(len(m) + 1) for m in members)), key=lambda c: (sum(c), c))
    if len(counts) > MAX_CONFIGURATIONS:
        raise PlanError(
            f"{len(machine)} devices of {len(members)} types have {len(counts)} configurations in a free order, more "
            f"than {MAX_CONFIGURATIONS}: keep the machine's order, or make more devices alike"
        )
    number = {c: i for i, c in enumerate(counts)}
    moves = []
    for c in counts:
        for kind, devices in enumerate(members):
            if c[kind] < len(devices):
                after = (*c[:kind], c[kind] + 1, *c[kind + 1 :])
                full = all(n == len(m) for n, m in zip(after, members, strict=True))
                moves.append(Move(number[c], number[after], (devices[c[kind]],), not any(c), full))
    used = tuple(tuple(i for n, m in zip(c, members, strict=True) for i in m[:n]) for c in counts)
    final = [len(counts) - 1] if use_all else range(1, len(counts))
    return Moves(tuple(moves), used, frozenset(final))


def _counted(found: Moves, n_stages: int) -> Moves:
    """Return the moves of plans of exactly `n_stages` stages, in configurations that also count stages."""
    # A new configuration is an old one with a number of stages; only those that some walk reaches get a number.
    ids: dict[tuple[int, int], int] = {(0, 0): 0}
    used: list[tuple[int, ...]] = [()]
    moves = []
    for rank in range(n_stages):
        for move in found.moves:
            # No walk gets to this configuration in so many stages.
            if (move.source, rank) not in ids:
                continue
            last = bool(move.devices) and rank == n_stages - 1
            # The last stage ends where a plan may end, and is not followed by anything far away.
            if last and move.target not in found.final:
                continue
            target = ids.setdefault((move.target, rank + bool(move.devices)), len(ids))
            if target == len(used):
                used.append(found.used[move.target])
            moves.append(
                replace(move, source=ids[move.source, rank], target=target, first=rank == 0, last=last, rank=rank)
            )
    final = frozenset(i for (q, stages), i in ids.items() if stages == n_stages and q in found.final)
    return Moves(tuple(moves), tuple(used), final, n_stages)


def powers(machine: Machine, found: Moves, host_speed: float) -> tuple[list[float], list[float]]:
    """Return how much work the devices used, and those still free, do in one ms, per configuration.

    An accelerator of speed 1 does 1, a host of speed 1 does `host_speed`.
    """

    def power(devices: Sequence[int]) -> float:
        return sum(machine.devices[d].speed * (host_speed if machine.devices[d].host else 1.0) for d in devices)

    # Both sums bound what a chain can have done and can still do.
    everything = power(range(len(machine)))
    done = [power(used) for used in found.used]
    return done, [everything - p for p in done]
