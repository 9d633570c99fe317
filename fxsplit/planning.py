"""plan(): from a profile, or a model, to a proven plan for a machine that need not be here."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any

from fxsplit.antichains import Antichains
from fxsplit.blocks import Blocks
from fxsplit.costs import Costs
from fxsplit.errors import InputError, PlanError
from fxsplit.formats import Profile, read
from fxsplit.machine import Device, Machine
from fxsplit.planner import Clock, Options, antichains_within, beats, least_load, merged, partition, problems, sequence
from fxsplit.plans import Plan
from fxsplit.schedule import PEAKS, find_schedule
from fxsplit.states import States
from fxsplit.workload import Pins, Workload

if TYPE_CHECKING:  # a model comes with torch; a profile does not need it
    from torch import nn

    from fxsplit.runtime import Pipeline

MAX_STATES = 1_000_000
MAX_DEVICES = 512


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans one profile for any number of machines; lattices are made once for each demand on them.

    `keep` are sets of submodules or nodes that stay together, besides what the profile demands; `pins` maps submodules
    or nodes to the number of their device; `never` are sets of nodes that no boundary may lie right behind. `seconds`
    adds up how long enumerating states and solving took.
    """

    costs: Costs
    pins: Mapping[str, int] = field(default_factory=dict)
    keep: Sequence[Sequence[str]] = ()
    max_states: int = MAX_STATES
    never: tuple[frozenset[str], ...] = ()
    seconds: dict[str, float] = field(default_factory=lambda: {"states": 0.0, "solve": 0.0})
    _made: dict[tuple[float, bool], tuple[Antichains, States]] = field(default_factory=dict)

    @cached_property
    def _constrained(self) -> Costs:
        """The costs with what the user keeps together."""
        self.costs.check()
        sets = [tuple(Pins(dict.fromkeys(names, 0)).nodes(self.costs)) for names in self.keep]
        return replace(self.costs, together=(*self.costs.together, *(s for s in sets if len(s) > 1)))

    def lattice(self, machine: Machine, whole: bool = False) -> tuple[Antichains, States]:
        """Return the states to plan for a machine; `whole` joins no nodes to neighbours.

        Joining may empty a stage, so that all later ones move up a device: it takes devices that are all alike.
        """
        memory_bytes = min(d.memory_bytes for d in machine.devices)
        made = self._made.get((memory_bytes, whole))
        if made is None or (made[0].slack_ms and len(made[0].blocks) < len(machine)):
            begin = time.perf_counter()
            costs = self._constrained
            blocks = Blocks.of(costs)
            smaller = blocks if whole else merged(costs, blocks, Pins(self.pins).nodes(costs), memory_bytes)
            known = self._made.get((memory_bytes, not whole))
            if known is not None and len(smaller) == len(known[0].blocks):
                self._made[memory_bytes, whole] = known  # nothing there to join
            else:
                pinned = Pins(self.pins).nodes(costs)
                # Light nodes join none where `whole` asks for that: there are at least as many blocks as there are.
                at_least = len(smaller) if whole else len(machine)
                chains = antichains_within(costs, smaller, self.max_states, memory_bytes, pinned, at_least)
                self._made[memory_bytes, whole] = chains, sequence(costs, chains)
            self.seconds["states"] += time.perf_counter() - begin
        return self._made[memory_bytes, whole]

    def plan(self, machine: Machine, workload: Workload, options: Options) -> Plan:
        """Return the plan whose slowest stage is fastest.

        Costless nodes that are joined to neighbours cannot have a stage of their own. Where every device is to have a
        stage, that loses nothing if plans that leave some idle are no faster; otherwise all nodes are looked at.
        """
        clock = Clock.limited(options.time_limit)
        # Pins name devices, which must not move, and `never` sets of nodes, which must not grow.
        alike = (options.free or (machine.uniform and not self.pins)) and not self.never
        small = self._solve(machine, workload, options, clock, *self.lattice(machine, whole=not alike))
        if isinstance(small, Plan) and (not alike or not options.use_all):
            return small
        blocks = Blocks.of(self._constrained)
        if (
            alike
            and len(self.lattice(machine)[0].blocks) < len(blocks)
            and (not isinstance(small, Plan) or self._beaten(small, machine, workload, options, clock))
        ):
            whole = self._solve(machine, workload, options, clock, *self.lattice(machine, whole=True))
            small = self._better(small, whole, machine)
        if isinstance(small, PlanError):
            raise small
        return small

    def _better(self, small: Plan | PlanError, whole: Plan | PlanError, machine: Machine) -> Plan | PlanError:
        """Return the better plan, bounded by what is known of all nodes; time may have been too short for that one."""
        if not isinstance(small, Plan) or (isinstance(whole, Plan) and whole.bottleneck_ms <= small.bottleneck_ms):
            return whole
        bound = whole.lower_bound_ms if isinstance(whole, Plan) else least_load(self._constrained, machine)
        return replace(small, lower_bound_ms=min(bound, small.bottleneck_ms))

    def _beaten(self, plan: Plan, machine: Machine, workload: Workload, options: Options, clock: Clock) -> bool:
        """Return whether a plan that leaves devices idle is faster than one that may not."""
        idle = replace(options, use_all=False)
        chains, states = self.lattice(machine)
        begin = time.perf_counter()
        pinned = Pins(self.pins).nodes(self.costs)
        posed = problems(self._constrained, chains, states, machine, workload, pinned, idle, self.never)
        answer = any(beats(problem, chains, plan.bottleneck_ms, clock) for problem in posed)
        self.seconds["solve"] += time.perf_counter() - begin
        return answer

    def _solve(
        self,
        machine: Machine,
        workload: Workload,
        options: Options,
        clock: Clock,
        chains: Antichains,
        states: States,
    ) -> Plan | PlanError:
        """Return the best plan among some states, or why there is none."""
        begin = time.perf_counter()
        try:
            pinned = Pins(self.pins).nodes(self.costs)
            return partition(self._constrained, chains, states, machine, workload, pinned, options, self.never, clock)
        except PlanError as error:
            return error
        finally:
            self.seconds["solve"] += time.perf_counter() - begin


def plan(
    profile: Costs | Pipeline | nn.Module | str | os.PathLike[str],
    machine: int | Machine,
    *,
    example_inputs: Any = None,
    schedule: str = "1F1B",
    n_microbatches: int | None = None,
    options: Options | None = None,
    pins: Mapping[str, int] | None = None,
    keep: Sequence[Sequence[str]] = (),
) -> Plan:
    """Return the plan whose slowest stage is fastest on `machine`, with its lower bound and gap.

    profile: costs, a pipeline that has some, the path of a profile (fxsplit's JSON, PipeDream's graph.txt, or a
        dnn-partitioning JSON), or a model, which is measured here on a CPU; `fxsplit.profile` measures elsewhere.
    machine: a number of equal devices with free links, or a Machine, which need not exist here.
    example_inputs: one whole batch for a model, as `compile` takes it.
    schedule, n_microbatches: what decides how many microbatches a stage holds (default: two a device).
    options: the cost model, and what the planner may do. pins: submodule or node -> number of its device. keep: sets of
        submodules or nodes that no cut may part.

    Raises PlanError where no plan exists (NoFit where memory is too small), ProfileError or InputError for bad input.
    """
    if isinstance(profile, (str, os.PathLike)):
        profile = read(profile).costs
    where = machine if isinstance(machine, Machine) else Machine.planned(machine)
    costs = profile if isinstance(profile, Costs) else getattr(profile, "costs", None)
    if not isinstance(costs, Costs):
        costs = _measured(profile, example_inputs, n_microbatches or 2 * len(where))
    return Planner(costs, pins or {}, keep).plan(where, demands(where, schedule, n_microbatches), options or Options())


def _measured(model: Any, example_inputs: Any, n_microbatches: int) -> Costs:
    """Return the costs of a model; raises InputError for anything else."""
    torch = sys.modules.get("torch")  # who has a model has loaded it
    if torch is None or not isinstance(model, torch.nn.Module):
        raise InputError(
            f"profile is a {type(model).__name__}: give costs, a compiled pipeline, the path of a profile, or a model"
        )
    if example_inputs is None:
        raise InputError("to plan for a model it is measured first: give example_inputs=, one whole batch")
    from fxsplit.profiling import profile

    return profile(model, example_inputs, n_microbatches=n_microbatches)


def demands(machine: Machine, schedule: str = "1F1B", n_microbatches: int | None = None) -> Workload:
    """Return what a schedule asks of each stage's memory, for every number of stages up to the machine's devices."""
    if len(machine) > MAX_DEVICES:
        raise InputError(f"{len(machine)} devices: plan for at most {MAX_DEVICES}")
    count = n_microbatches or 2 * len(machine)
    find_schedule(schedule, tuple(PEAKS))
    return Workload(schedule, count, {k: PEAKS[schedule](k, count) for k in range(1, len(machine) + 1)})


def machine_of(profile: Profile, devices: int | None, bandwidth: float | None) -> Machine:
    """Return the machine that a file states, or `devices` equal accelerators in their place."""
    stated = 2 if profile.accelerators is None else profile.accelerators
    count = stated if devices is None else devices
    if count < 1 and not profile.hosts:
        raise InputError(f"devices={count}: give at least 1 device to plan for")
    bytes_per_s = bandwidth or profile.bytes_per_s
    made = [Device(f"device{i}", memory_bytes=profile.memory_bytes, bytes_per_s=bytes_per_s) for i in range(count)]
    made += [Device(f"host{i}", host=True) for i in range(profile.hosts)]
    return Machine(tuple(made), (inf,) * (len(made) - 1))
