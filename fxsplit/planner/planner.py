"""Planner: plan one profile for any number of machines; lattices are made once for each demand on them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from fxsplit.errors import PlanError
from fxsplit.ir.facts.antichains import Antichains
from fxsplit.ir.facts.blocks import Blocks
from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.machine import Machine
from fxsplit.ir.facts.pins import Pins
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.states import States
from fxsplit.ir.facts.workload import Workload
from fxsplit.planner import (
    Clock,
    Options,
    beats,
    bound_by_work,
    contract_costless_nodes,
    enumerate_within,
    partition,
    pose_problems,
    sequence_states,
)

if TYPE_CHECKING:  # a model comes with torch; a profile does not need it
    pass


MAX_STATES = 1_000_000


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
            smaller = (
                blocks if whole else contract_costless_nodes(costs, blocks, Pins(self.pins).nodes(costs), memory_bytes)
            )
            known = self._made.get((memory_bytes, not whole))
            if known is not None and len(smaller) == len(known[0].blocks):
                self._made[memory_bytes, whole] = known  # nothing there to join
            else:
                pinned = Pins(self.pins).nodes(costs)
                # Light nodes join none where `whole` asks for that: there are at least as many blocks as there are.
                at_least = len(smaller) if whole else len(machine)
                chains = enumerate_within(costs, smaller, self.max_states, memory_bytes, pinned, at_least)
                self._made[memory_bytes, whole] = chains, sequence_states(costs, chains)
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
        bound = whole.lower_bound_ms if isinstance(whole, Plan) else bound_by_work(self._constrained, machine)
        return replace(small, lower_bound_ms=min(bound, small.bottleneck_ms))

    def _beaten(self, plan: Plan, machine: Machine, workload: Workload, options: Options, clock: Clock) -> bool:
        """Return whether a plan that leaves devices idle is faster than one that may not."""
        idle = replace(options, use_all=False)
        chains, states = self.lattice(machine)
        begin = time.perf_counter()
        pinned = Pins(self.pins).nodes(self.costs)
        posed = pose_problems(self._constrained, chains, states, machine, workload, pinned, idle, self.never)
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
