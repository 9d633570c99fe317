"""The way from a profile to a plan: which states to search, when fewer of them are enough, and the search itself.

The passes augment, order and partition take this way one step each, and learn a fact at every step. `Planner` takes it
as a whole, for one profile and any number of machines. So `compile` and `fxsplit.plan` come to the same plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from fxsplit.errors import PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.pins import Pins, find_nodes, suggest_names
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.facts.plan import Plan
from fxsplit.planner.clock import Clock
from fxsplit.planner.lattice.lattice import enumerate_ideals
from fxsplit.planner.lattice.sequence import sequence_states
from fxsplit.planner.solve import Misfit, Options, Task, bound_by_work, find_plan, search
from fxsplit.system.progress import phase

MAX_STATES = 1_000_000
"""Ideals to enumerate at most, where nothing else is stated."""

Enumerate = Callable[[bool], tuple[Antichains, States]]


def plan_stages(task: Task, chains: Antichains, states: States, enumerate_again: Enumerate, clock: Clock) -> Plan:
    """Return the plan whose slowest stage is fastest.

    `enumerate_again` returns other states for the task: with True none of the nodes are joined, with False light ones,
    where parameters count as the task makes them. It is called only where the states given do not suffice. Raises
    PlanError where no plan exists.
    """
    # Nodes were joined as if their parameters cost nothing, and the task lets stages have replicas.
    if chains.slack is not None and chains.slack.weighed_ms_per_byte < task.reduce_ms_per_byte:
        chains, states = enumerate_again(False)
    # Pins may have come after the nodes were joined, and the joining may have moved a pinned node.
    if chains.joined and (task.never or not task.interchangeable or not chains.joined.isdisjoint(task.pinned)):
        chains, states = enumerate_again(True)
    best = _attempt(task, chains, states, clock)
    # Nodes joined to neighbours cannot have a stage of their own. That loses nothing unless every device is to have a
    # stage and a plan that leaves one idle would be faster.
    if chains.joined and (
        not isinstance(best, Plan) or (task.options.use_all and _is_beaten(best, task, chains, states, clock))
    ):
        best = _take_better(best, _attempt(task, *enumerate_again(True), clock), task)
    if isinstance(best, Misfit):
        raise best.explain()
    if isinstance(best, PlanError):
        raise best
    return best


def _attempt(task: Task, chains: Antichains, states: States, clock: Clock) -> Plan | Misfit | PlanError:
    """Return the best plan among some states, or why there is none."""
    try:
        return find_plan(task, chains, states, clock)
    except PlanError as error:
        return error


def _is_beaten(plan: Plan, task: Task, chains: Antichains, states: States, clock: Clock) -> bool:
    """Return whether some plan that leaves devices idle is faster than `plan`, which leaves none idle."""
    # A plan on fewer devices leaves more freedom, so it bounds what joining may have lost.
    idle = replace(task, options=replace(task.options, use_all=False))
    faster = search(idle, chains, states, clock, upper=plan.bottleneck_ms)
    return faster.best is not None or faster.hurried


def _take_better(
    joined: Plan | Misfit | PlanError, whole: Plan | Misfit | PlanError, task: Task
) -> Plan | Misfit | PlanError:
    """Return the better of a plan with nodes joined and one without, bounded by what is known of all nodes."""
    if not isinstance(joined, Plan) or (isinstance(whole, Plan) and whole.bottleneck_ms <= joined.bottleneck_ms):
        return whole
    # The time may have been too short for the search over all nodes.
    bound = whole.lower_bound_ms if isinstance(whole, Plan) else bound_by_work(task.costs, task.machine)
    return replace(joined, lower_bound_ms=min(bound, joined.bottleneck_ms)).prove("bound")


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans one profile for any number of machines; states are enumerated once for each amount of memory.

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
    _known: dict[tuple[float, bool, float], tuple[Antichains, States]] = field(default_factory=dict)

    @cached_property
    def _constrained(self) -> Costs:
        """The costs with what the user keeps together."""
        self.costs.check()
        for name in (name for names in self.keep for name in names):
            if not find_nodes(self.costs, name):
                raise PlanError(f"cannot keep {name!r} together with others: {suggest_names(self.costs, name)}")
        # A path of a submodule means all its nodes, as for pins.
        sets = [tuple(dict.fromkeys(n for path in names for n in find_nodes(self.costs, path))) for names in self.keep]
        return replace(self.costs, together=(*self.costs.together, *(s for s in sets if len(s) > 1)))

    @cached_property
    def _pinned(self) -> dict[str, int]:
        """The pinned nodes, each with the number of its device."""
        return Pins(self.pins).nodes(self.costs)

    def lattice(self, machine: Machine, whole: bool = False, ms_per_byte: float = 0.0) -> tuple[Antichains, States]:
        """Return the states to plan for a machine; `whole` joins no nodes to neighbours.

        Joining may empty a stage, so that all later ones move up a device: it takes devices that are all alike.
        `ms_per_byte` is what replicas of a stage take to sum a byte of gradients.
        """
        memory_bytes = min(d.memory_bytes for d in machine.devices)
        key = memory_bytes, whole, 0.0 if whole else ms_per_byte
        known = self._known.get(key)
        # Light nodes were joined for fewer devices, and now there are more than blocks: join fewer of them.
        if known is None or (known[0].slack is not None and len(known[0].blocks) < len(machine)):
            begin = time.perf_counter()
            costs = self._constrained
            with phase(f"enumerating states of {len(costs.nodes)} nodes"):
                chains = enumerate_ideals(
                    costs, machine, self._pinned, self.max_states, join=not whole, ms_per_byte=ms_per_byte
                )
                known = chains, sequence_states(costs, chains)
            self._known[key] = known
            if not chains.joined:  # there was nothing to join, so these are all states too
                self._known.setdefault((memory_bytes, True, 0.0), known)
            self.seconds["states"] += time.perf_counter() - begin
        return known

    def plan(self, machine: Machine, workload: Workload, options: Options) -> Plan:
        """Return the plan whose slowest stage is fastest; raises PlanError where no plan exists."""
        clock = Clock.limited(options.time_limit)
        begin, earlier = time.perf_counter(), self.seconds["states"]
        try:
            # Enumerating may come in the middle of solving; its time counts apart.
            task = Task(self._constrained, machine, workload, options, self._pinned, self.never)
            chains, states = self.lattice(
                machine, bool(self.never) or not task.interchangeable, task.reduce_ms_per_byte
            )
            again = partial(self.lattice, machine, ms_per_byte=task.reduce_ms_per_byte)
            with phase(f"planning for {len(machine)} devices"):
                return plan_stages(task, chains, states, again, clock)
        finally:
            self.seconds["solve"] += time.perf_counter() - begin - (self.seconds["states"] - earlier)
