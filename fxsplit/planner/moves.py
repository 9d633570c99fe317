"""Moves: which devices a stage may take after the ones before it, as a graph of configurations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from fxsplit.errors import PlanError
from fxsplit.ir.facts.machine import Machine

MAX_CONFIGURATIONS = 4096


@dataclass(frozen=True)
class Move:
    """One stage's choice of devices: from a configuration to another; `first` and `last` say that no stage is beyond.

    `rank` is the stage's number where that is known beforehand, else -1. With `recompute` the stage keeps no
    activations between forward and backward, and runs forward again.
    """

    source: int
    target: int
    devices: tuple[int, ...]
    first: bool
    last: bool
    rank: int = -1
    recompute: bool = False


@dataclass(frozen=True)
class Moves:
    """All moves, in an order in which a configuration is complete before it is left.

    `used` are the devices that each configuration has used up; configuration 0 has used none, and `final` are those in
    which a plan may end. `n_stages` is how many stages a plan has, where that is known beforehand.
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
    use_all: bool,
    free: bool,
    n_stages: int | None,
    recompute: str = "never",
    named: frozenset[int] = frozenset(),
) -> Moves:
    """Return the moves over a machine's devices.

    In the order of the machine, stage after stage takes the next device (or several, where stages may be `replicated`);
    in `free` order any one left of each type. With `n_stages` a configuration also counts stages, since what a stage
    must hold depends on its number, and only plans of so many stages end. Stages recompute never, always, or (auto) as
    each sees fit. Devices in `named` are like no others, since something is pinned to them.
    """
    found = _free(machine, use_all, named) if free else _in_order(machine, replicated, use_all)
    ways = {"never": (False,), "always": (True,), "auto": (False, True)}[recompute]
    found = replace(found, moves=tuple(replace(m, recompute=way) for m in found.moves for way in ways))
    return found if n_stages is None else _counted(found, n_stages)


def _in_order(machine: Machine, replicated: bool, use_all: bool) -> Moves:
    """Return moves that take the devices as they stand; configuration q has used the first q. Hosts are no replicas."""
    count = len(machine)
    moves = [
        Move(a, b, tuple(range(a, b)), a == 0, b == count)
        for a in range(count)
        for b in range(a + 1, count + 1 if replicated else a + 2)
        if b == a + 1 or not any(d.host for d in machine.devices[a:b])
    ]
    used = tuple(tuple(range(q)) for q in range(count + 1))
    return Moves(tuple(moves), used, frozenset([count] if use_all else range(1, count + 1)))


def _free(machine: Machine, use_all: bool, named: frozenset[int]) -> Moves:
    """Return moves that take devices in any order; equal devices are one type, and a configuration counts each type."""
    if len(set(machine.links)) > 1:
        raise PlanError(
            "a free order of devices needs equal links between all of them: state each device's own link as "
            "Device(bytes_per_s=), or keep the machine's order"
        )
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i, d in enumerate(machine.devices):
        kinds.setdefault((d.memory_bytes, d.speed, d.bytes_per_s, d.host, i if i in named else None), []).append(i)
    members = list(kinds.values())
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
    ids: dict[tuple[int, int], int] = {(0, 0): 0}
    used: list[tuple[int, ...]] = [()]
    moves = []
    for rank in range(n_stages):
        for move in found.moves:
            if (move.source, rank) not in ids:
                continue
            target = ids.setdefault((move.target, rank + 1), len(ids))
            if target == len(used):
                used.append(found.used[move.target])
            last = rank == n_stages - 1
            moves.append(Move(ids[move.source, rank], target, move.devices, rank == 0, last, rank, move.recompute))
    final = frozenset(i for (q, stages), i in ids.items() if stages == n_stages and q in found.final)
    return Moves(tuple(moves), tuple(used), final, n_stages)


def powers(machine: Machine, found: Moves, host_speed: float) -> tuple[list[float], list[float]]:
    """Return how much work the devices used, and those still free, do in one unit of time, per configuration.

    A host does `host_speed` of it.
    """

    def power(devices: Sequence[int]) -> float:
        return sum(machine.devices[d].speed * (host_speed if machine.devices[d].host else 1.0) for d in devices)

    everything = power(range(len(machine)))
    done = [power(used) for used in found.used]
    return done, [everything - p for p in done]
