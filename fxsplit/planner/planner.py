"""Planner: from a profile to a plan.

It chooses the states to search, decides when nodes may be joined to make fewer states, and runs the search. The passes
augment, order and partition do the same step by step, with a fact for each step. `Planner` does it in one call, for one
profile and any number of machines, so that `compile` and `fxsplit.plan` return the same plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from logging import WARNING
from typing import Any

from fxsplit.errors import PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.pins import Pins, find_nodes, suggest_names
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.facts.plan import Plan
from fxsplit.planner.clock import SearchClock
from fxsplit.planner.lattice.lattice import enumerate_ideals
from fxsplit.planner.lattice.sequence import sequence_states
from fxsplit.planner.solve import Misfit, Options, Task, bound_by_work, find_plan, search
from fxsplit.planner.step.step import plan_step
from fxsplit.system.figures import format_count
from fxsplit.system.logs import emit
from fxsplit.system.progress import phase

MAX_STATES = 1_000_000
"""The default limit of the number of ideals."""

Enumerate = Callable[[bool], tuple[Antichains, States]]


def plan_stages(task: Task, chains: Antichains, states: States, enumerate_again: Enumerate, clock: SearchClock) -> Plan:
    """Return the plan with the smallest bottleneck, or the shortest step, as the options say, and log it.

    If the given states do not suffice, `enumerate_again` returns new ones. With True it joins no nodes. With False it
    joins light nodes, and counts the time in which the task's replicas reduce the gradients of their parameters. Raises
    PlanError if no plan exists.
    """
    begin = time.perf_counter()
    choose = plan_step if task.options.objective == "step" else partial(_plan_bottleneck, enumerate_again)
    try:
        plan = choose(task, chains, states, clock)
    except PlanError as error:
        # Not an error: a caller may try several numbers of devices or microbatches.
        emit("plan", "no_plan", "no plan", error=error, level=WARNING)
        raise
    figures: dict[str, Any] = {"bottleneck_ms": plan.bottleneck_ms, "lower_bound_ms": plan.lower_bound_ms}
    seconds = time.perf_counter() - begin
    emit("plan", "plan", plan.summarise(), n_stages=len(plan.stages), seconds=seconds, **figures)
    return plan


def _plan_bottleneck(
    enumerate_again: Enumerate, task: Task, chains: Antichains, states: States, clock: SearchClock
) -> Plan:
    """Return the plan with the smallest bottleneck. Raises PlanError if no plan exists."""
    # A schedule that puts several stages on a device has all of its stages.
    if task.machine.homes:
        task = replace(task, options=replace(task.options, use_all=True))
    # The nodes were joined as if parameters cost nothing, and now stages may have replicas, which reduce gradients.
    if chains.slack is not None and chains.slack.weighed_ms_per_byte < task.reduce_ms_per_byte:
        chains, states = enumerate_again(False)
    # Joining may have moved a node that was pinned later.
    if chains.joined and (task.never or not task.interchangeable or not chains.joined.isdisjoint(task.pinned)):
        chains, states = enumerate_again(True)
    best = _attempt(task, chains, states, clock)
    # A node that joined a neighbour cannot form a stage of its own. This loses nothing, unless every device must get a
    # stage and a plan with idle devices is faster.
    if chains.joined and (
        not isinstance(best, Plan) or (task.options.use_all and _is_beaten(best, task, chains, states, clock))
    ):
        best = _take_better(best, _attempt(task, *enumerate_again(True), clock), task)
    if isinstance(best, Misfit):
        raise best.explain()
    if isinstance(best, PlanError):
        raise best
    return best


def _attempt(task: Task, chains: Antichains, states: States, clock: SearchClock) -> Plan | Misfit | PlanError:
    """Return the best plan among these states, or the reason why none exists."""
    try:
        return find_plan(task, chains, states, clock)
    except PlanError as error:
        return error


def _is_beaten(plan: Plan, task: Task, chains: Antichains, states: States, clock: SearchClock) -> bool:
    """Return whether a plan with idle devices is faster than `plan`, which uses all devices."""
    # Fewer devices leave more freedom, so such a plan bounds the loss due to joining.
    idle = replace(task, options=replace(task.options, use_all=False))
    faster = search(idle, chains, states, clock, upper=plan.bottleneck_ms)
    return faster.best is not None or faster.hurried


def _take_better(
    joined: Plan | Misfit | PlanError, whole: Plan | Misfit | PlanError, task: Task
) -> Plan | Misfit | PlanError:
    """Return the better of two plans: `joined` of joined nodes, and `whole` of all nodes apart.

    Its lower bound is for plans of all nodes apart.
    """
    if not isinstance(joined, Plan) or (isinstance(whole, Plan) and whole.bottleneck_ms <= joined.bottleneck_ms):
        return whole
    # The time may have been too short for the search over all nodes.
    bound = whole.lower_bound_ms if isinstance(whole, Plan) else bound_by_work(task.costs, task.machine)
    return replace(joined, lower_bound_ms=min(bound, joined.bottleneck_ms)).prove("bound")


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans one profile for any number of machines. It enumerates the states once for each amount of memory.

    - `pins` maps submodules or nodes to the number of their device
    - `together` are sets of submodules or nodes that stay in one stage, in addition to the profile's own
    - `never` are sets of nodes after which no stage boundary may lie
    - `seconds` adds up the time for enumerating states and for solving
    """

    costs: Costs
    pins: Mapping[str, int] = field(default_factory=dict)
    together: Sequence[Sequence[str]] = ()
    max_states: int = MAX_STATES
    never: tuple[frozenset[str], ...] = ()
    seconds: dict[str, float] = field(default_factory=lambda: {"states": 0.0, "solve": 0.0})
    _known: dict[tuple[float, bool, float], tuple[Antichains, States]] = field(default_factory=dict)

    @cached_property
    def _constrained(self) -> Costs:
        """The costs, with the user's `together` added to the sets that stay together."""
        self.costs.check()
        text = next((names for names in self.together if isinstance(names, str)), None)
        if text is not None:
            raise PlanError(
                f"together has {text!r}: give sets of names that stay together, such as together=[('a', 'b')]"
            )
        for name in (name for names in self.together for name in names):
            if not find_nodes(self.costs, name):
                raise PlanError(f"cannot keep {name!r} together with others: {suggest_names(self.costs, name)}")
        # As in pins, the path of a submodule stands for all its nodes.
        sets = [
            tuple(dict.fromkeys(n for path in names for n in find_nodes(self.costs, path))) for names in self.together
        ]
        return replace(self.costs, together=(*self.costs.together, *(s for s in sets if len(s) > 1)))

    def _pin(self, machine: Machine) -> dict[str, int]:
        """Return device numbers by pinned node."""
        return Pins(self.pins).nodes(self.costs, machine)

    def lattice(self, machine: Machine, whole: bool = False, ms_per_byte: float = 0.0) -> tuple[Antichains, States]:
        """Return the ideals and states to plan for a machine.

        whole: keep all nodes apart. By default costless and light nodes join a neighbour, so there are fewer ideals. A
            plan may then lose a stage, and the next stage takes its device: so the devices must be equal.
        ms_per_byte: the time that replicas take to reduce one byte of gradients.
        """
        memory_bytes = min(d.memory_bytes for d in machine.devices)
        key = memory_bytes, whole, 0.0 if whole else ms_per_byte
        known = self._known.get(key)
        # The known states were joined for fewer devices and have too few blocks for this machine: join less.
        if known is None or (known[0].slack is not None and len(known[0].blocks) < len(machine)):
            begin = time.perf_counter()
            costs, pinned = self._constrained, self._pin(machine)
            with phase(f"enumerating states of {format_count(len(costs.nodes), 'node')}"):
                chains = enumerate_ideals(
                    costs, machine, pinned, self.max_states, join=not whole, ms_per_byte=ms_per_byte
                )
                known = chains, sequence_states(costs, chains)
            self._known[key] = known
            if not chains.joined:  # nothing was joined, so these are also the states for whole=True
                self._known.setdefault((memory_bytes, True, 0.0), known)
            self.seconds["states"] += time.perf_counter() - begin
        return known

    def plan(self, machine: Machine, workload: Workload, options: Options) -> Plan:
        """Return the plan with the smallest bottleneck, or the shortest step. Raises PlanError if no plan exists."""
        clock = SearchClock.limited(options.time_limit)
        begin, earlier = time.perf_counter(), self.seconds["states"]
        try:
            # plan_stages may enumerate again; that time counts as "states", not as "solve".
            task = Task(self._constrained, machine, workload, options, self._pin(machine), self.never)
            chains, states = self.lattice(
                machine, bool(self.never) or not task.interchangeable, task.reduce_ms_per_byte
            )
            again = partial(self.lattice, machine, ms_per_byte=task.reduce_ms_per_byte)
            with phase(f"planning for {format_count(len(machine), 'device')}"):
                return plan_stages(task, chains, states, again, clock)
        finally:
            self.seconds["solve"] += time.perf_counter() - begin - (self.seconds["states"] - earlier)
