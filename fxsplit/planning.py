"""plan(): from a profile, or a model, to a proven plan for a machine that need not be here."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fxsplit.antichains import Antichains
from fxsplit.costs import Costs
from fxsplit.errors import InputError
from fxsplit.formats import Profile, read
from fxsplit.machine import Device, Machine
from fxsplit.plan import Plan
from fxsplit.planner import Options, antichains, partition, sequence
from fxsplit.schedule import find_schedule
from fxsplit.states import States
from fxsplit.workload import Pins, Workload

if TYPE_CHECKING:  # a model comes with torch; a profile does not need it
    from fxsplit.runtime import Pipeline

MAX_STATES = 1_000_000


@dataclass(frozen=True, eq=False)
class Lattice:
    """What planning for any machine starts from, made once for each profile; `seconds` is how long that took."""

    costs: Costs
    chains: Antichains
    states: States
    seconds: float

    @classmethod
    def of(cls, costs: Costs, max_states: int = MAX_STATES) -> Lattice:
        """Return the lattice of a profile, of which at most `max_states` ideals are enumerated."""
        begin = time.perf_counter()
        chains = antichains(costs, max_states)
        return cls(costs, chains, sequence(costs, chains), time.perf_counter() - begin)

    def plan(self, machine: Machine, workload: Workload, options: Options, pins: Mapping[str, int]) -> Plan:
        """Return the best plan for a machine."""
        pinned = Pins(pins).nodes(self.costs)
        return partition(self.costs, self.chains, self.states, machine, workload, pinned, options)


def plan(
    profile: Costs | Pipeline | str | os.PathLike[str],
    machine: int | Machine,
    *,
    schedule: str = "1F1B",
    n_microbatches: int | None = None,
    options: Options | None = None,
    pins: Mapping[str, int] | None = None,
) -> Plan:
    """Return the plan whose slowest stage is fastest on `machine`, with its lower bound and gap.

    profile: costs, a pipeline that has some, or the path of a profile (fxsplit's JSON, PipeDream's graph.txt, or a
        dnn-partitioning JSON).
    machine: a number of equal devices with free links, or a Machine, which need not exist here.
    schedule, n_microbatches: what decides how many microbatches a stage holds (default: two a device).
    options: the cost model, and what the planner may do. pins: submodule or node -> number of its stage.

    Raises PlanError where no plan fits, ProfileError or InputError for bad input.
    """
    if isinstance(profile, (str, os.PathLike)):
        profile = read(profile).costs
    costs = profile if isinstance(profile, Costs) else getattr(profile, "costs", None)
    if not isinstance(costs, Costs):
        raise InputError(f"profile={profile!r}: give costs, a compiled pipeline, or the path of a profile")
    costs.check()
    where = machine if isinstance(machine, Machine) else Machine.planned(machine)
    return Lattice.of(costs).plan(where, demands(where, schedule, n_microbatches), options or Options(), pins or {})


def demands(machine: Machine, schedule: str, n_microbatches: int | None) -> Workload:
    """Return what a schedule asks of each stage's memory, for every number of stages up to the machine's devices."""
    count = n_microbatches or 2 * len(machine)
    generate = find_schedule(schedule)
    peaks = {k: generate(k, count).peak_in_flight() for k in range(1, len(machine) + 1)}
    return Workload(schedule, count, peaks)


def machine_of(profile: Profile, devices: int | None, bandwidth: float | None) -> tuple[Machine, Options]:
    """Return the machine that a file states, or `devices` equal ones, and the options that its own tool plans with.

    A dnn-partitioning file's accelerators and hosts may be taken in any order, and stay idle.
    """
    accelerators = devices or profile.accelerators or 2
    bytes_per_s = bandwidth or profile.bytes_per_s
    made = [
        Device(f"device{i}", memory_bytes=profile.memory_bytes, bytes_per_s=bytes_per_s) for i in range(accelerators)
    ]
    made += [Device(f"host{i}", host=True) for i in range(profile.hosts)]
    machine = Machine(tuple(made), (float("inf"),) * (len(made) - 1))
    foreign = profile.format == "dnn-partitioning"
    return machine, replace(Options(), model=profile.cost_model, free=foreign, use_all=False)
