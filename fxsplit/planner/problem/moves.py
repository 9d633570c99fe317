"""Moves: the devices that a stage may take after the stages before it.

A *configuration* is a set of used devices. A *move* leads from one configuration to another, over the devices of one
stage, or over a device that stays idle. A plan is a walk from configuration 0 to a final configuration. Two devices:

    in order           replicated             last may be idle      any may be idle

    0 -> 1 -> 2        0 -> 1 -> 2            0 -> 1 -> 2           0 -> 1 -> 2
                       0 ------> 2            final: 1 and 2        0 .> 1 -> 2   (.> leaves device 0 idle)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from fxsplit.errors import PlanError
from fxsplit.ir.facts.given.machine import Machine

MAX_CONFIGURATIONS = 4096
"""The limit of configurations: the search keeps a table of states for each."""


@dataclass(frozen=True)
class Move:
    """One stage's devices, from one configuration to another. Without devices, the next device stays idle.

    - `first`, `last`: no stage comes before, or after
    - `rank`: the number of the stage if it is known beforehand, else -1
    - `recompute`: the stage keeps no activations and runs its forward again in the backward
    - `near_before`, `near_after`: the stage before, or after, is on the neighbouring device. Across an idle device the
      link may be slower.
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

    - `moves`: a move into a configuration comes before any move out of it
    - `used`: the used devices of each configuration; configuration 0 has none
    - `final`: the configurations in which a plan may end
    - `n_stages`: the number of stages of every plan if it is fixed, else 0
    """

    moves: tuple[Move, ...]
    used: tuple[tuple[int, ...], ...]
    final: frozenset[int]
    n_stages: int = 0

    @cached_property
    def number(self) -> dict[Move, int]:
        """The index of each move."""
        return {move: i for i, move in enumerate(self.moves)}


@lru_cache(maxsize=128)  # a search over schedules lists the same moves repeatedly
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

    - In the machine's order each stage takes the next device, or several if stages may be `replicated`; in `free` order
      it takes any unused device
    - `idle`: the devices that may stay idle, "none", the "last" ones (enough for equal devices) or "any"; in free order
      "last" means any
    - `n_stages`: plans must have exactly this many stages, and configurations count them, since the memory of a stage
      depends on its number
    - `recompute`: "never", "always", or "auto" to let the search choose for each stage
    - `named`: devices with pinned nodes, which are interchangeable with no other device

    Raises PlanError for a free order over unequal links, or over too many different devices.
    """
    if free:
        found = _free(machine, idle == "none", named)
    else:
        found = _leaving_out(machine, replicated, named) if idle == "any" else _in_order(machine, replicated, idle)
    ways = {"never": (False,), "always": (True,), "auto": (False, True)}[recompute]
    # An idle device has nothing to recompute.
    moves = [replace(m, recompute=way) for m in found.moves for way in (ways if m.devices else (False,))]
    found = replace(found, moves=tuple(moves))
    return found if n_stages is None else _counted(found, n_stages)


def _in_order(machine: Machine, replicated: bool, idle: str) -> Moves:
    """Return moves that give devices to stages in the machine's order. Configuration q has used the first q devices.

    replicated: a stage may take several neighbouring devices. idle: "none" if all devices have to be used.
    """
    count = len(machine)
    moves = [
        Move(a, b, tuple(range(a, b)), a == 0, b == count)
        for a in range(count)
        for b in _list_ends(machine, a, replicated)
    ]
    used = tuple(tuple(range(q)) for q in range(count + 1))
    return Moves(tuple(moves), used, frozenset([count] if idle == "none" else range(1, count + 1)))


def _list_ends(machine: Machine, begin: int, replicated: bool) -> list[int]:
    """Return each b such that a stage may take the devices `begin` to b - 1."""
    ends = range(begin + 1, len(machine) + 1 if replicated else begin + 2)
    # A host's times differ from an accelerator's for each node, so the two cannot share a stage.
    return [b for b in ends if b == begin + 1 or not any(d.host for d in machine.devices[begin:b])]


def _leaving_out(machine: Machine, replicated: bool, named: frozenset[int]) -> Moves:
    """Return moves over the devices in order. A device may stay idle, unless it is in `named` (it has pinned nodes).

    replicated: a stage may take several neighbouring devices.

    A configuration is a pair (q, where). The first q devices are decided: each has a stage or stays idle. `where` says
    where the previous stage is, since that decides the link over which it sends: on device q - 1 ("near"), on an
    earlier device ("far"), or nowhere ("none"), before the first stage. One move takes a stage together with the idle
    device after it, and so ends "far". If all links are equal, `where` is always "none".

        device     0      1      2
                [stage]   .   [stage]      (0, none) -> (2, far) -> (3, near): the first stage ends far
    """
    count = len(machine)
    apart = not machine.equal_links
    kinds = ("none", "near", "far") if apart else ("none",)
    # "near" needs one device for the previous stage, "far" one more that is idle.
    least = {"none": 0, "near": 1, "far": 2}
    reached = [(q, where) for q in range(count + 1) for where in kinds if q >= least[where]]
    # After the last device only one configuration is left, the final one.
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
        # After a "near" stage the next stage is on device q, which cannot be idle.
        if where != "near" and q + 1 < count and q not in named:
            moves.append(Move(source, number[q + 1, where], (), False, False))
    used = tuple(tuple(range(q)) for q, _ in reached)
    final = [i for (q, where), i in number.items() if q > 0 and where == ("near" if apart else "none")]
    return Moves(tuple(moves), used, frozenset(final))


def _free(machine: Machine, use_all: bool, named: frozenset[int]) -> Moves:
    """Return moves over the devices in any order. Equal devices form a type, and a configuration counts each type."""
    # The transfer time of a stage must not depend on its neighbour's device.
    if not machine.equal_links:
        raise PlanError(
            "a free order of devices needs equal links between all of them: state each device's own link as "
            "Device(bytes_per_s=), or keep the machine's order"
        )
    # Equal devices are interchangeable, which keeps the number of configurations small.
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i, d in enumerate(machine.devices):
        kinds.setdefault((d.memory_bytes, d.speed, d.bytes_per_s, d.host, i if i in named else None), []).append(i)
    members = list(kinds.values())
    # Sort by the number of used devices, so that moves into a configuration come before moves out of it.
    counts = sorted(itertools.product(*(range(len(m) + 1) for m in members)), key=lambda c: (sum(c), c))
    if len(counts) > MAX_CONFIGURATIONS:
        raise PlanError(
            f"{len(machine)} devices of {len(members)} types have {len(counts)} configurations in a free order, more "
            f"than {MAX_CONFIGURATIONS}: keep the machine's order, or make more devices equal"
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
    """Return moves for plans of exactly `n_stages` stages, with configurations that also count stages."""
    # A new configuration is an old one plus a stage count. Number only the reachable ones.
    ids: dict[tuple[int, int], int] = {(0, 0): 0}
    used: list[tuple[int, ...]] = [()]
    moves = []
    for rank in range(n_stages):
        for move in found.moves:
            # No walk reaches this configuration with this many stages.
            if (move.source, rank) not in ids:
                continue
            last = bool(move.devices) and rank == n_stages - 1
            # The last stage must end in a final configuration.
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
    """Return the work per ms of the used devices, and of the unused devices, for each configuration.

    An accelerator of speed 1 does 1 per ms, a host of speed 1 does `host_speed`.
    """

    def power(devices: Sequence[int]) -> float:
        return sum(machine.devices[d].speed * (host_speed if machine.devices[d].host else 1.0) for d in devices)

    # The two sums bound the work a chain can have done and can still do.
    everything = power(range(len(machine)))
    done = [power(used) for used in found.used]
    return done, [everything - p for p in done]
