"""Solve: pose the search problems, search for the best chain of states, and price it as a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import inf, isclose, isfinite

from fxsplit.errors import ChainError, PlanError, TooFewParts, suggest
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.lattice.antichains import Antichains, Slack
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.facts.plan import PROVEN, Plan
from fxsplit.ir.facts.price import COST_MODELS, CostModel, Split, price_split
from fxsplit.planner.clock import OutOfTime, SearchClock
from fxsplit.planner.direct import pose_direct
from fxsplit.planner.no_plan import explain_misfit
from fxsplit.planner.problem.moves import list_moves
from fxsplit.planner.problem.problem import Path, Problem, pose_problem
from fxsplit.planner.search.bounds import level_bound
from fxsplit.planner.search.search import SLACK, BestChain, may_fit, minimise
from fxsplit.system.figures import show

RECOMPUTE = ("never", "always", "auto")
OBJECTIVES = ("bottleneck", "step")
MOST_CELLS, MOST_BOUNDED = 2**26, 2**25
"""Above this number of cells (configurations x states) only the last devices may stay idle, so a gap remains.

The second number applies with memory limits, since a cell then takes longer.
"""
MOST_FACTOR = 1e3
"""A larger `optimizer_factor` is refused as a mistake."""


@dataclass(frozen=True)
class Options:
    """The options of a plan, and the time for its search.

    - `use_all` asks for a stage on every device; without it a device stays idle unless it makes the plan faster
    - `optimizer_factor` is the bytes of optimizer state per byte of parameters: 2 for Adam, 1 for momentum, 0 for SGD
    - `model` is the cost model, and `traffic` includes the time of transfers in it (see CostModel)
    - `free` takes the devices in any order, not only in the machine's
    - `time_limit` is in seconds; when it is over, the result is the best plan so far, with its gap
    - `recompute` says which stages keep no activations and run their forward again: "always" all stages, "never" none,
      "auto" a stage if it would not fit otherwise, or would be slower
    - `objective` is what the plan makes as small as possible: "bottleneck", the load of the slowest stage, or "step",
      the time of a whole step under its schedule (see planner/step)

    Raises ChainError for an invalid value.
    """

    use_all: bool = True
    optimizer_factor: float = 2.0
    model: str = "forwarded"
    traffic: bool = True
    free: bool = False
    time_limit: float = inf
    recompute: str = "never"
    objective: str = "bottleneck"

    def __post_init__(self) -> None:
        number, flag = (int, float), (bool,)
        fields = {"optimizer_factor": number, "time_limit": number, "use_all": flag, "traffic": flag, "free": flag}
        for what, kinds in fields.items():
            value = getattr(self, what)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                kind = "True or False" if kinds == (bool,) else "a number"
                raise ChainError(f"partition{{{what}={show(value)}}}: give {kind}")
        if not 0 <= self.optimizer_factor <= MOST_FACTOR:
            raise ChainError(
                f"partition{{optimizer_factor={show(self.optimizer_factor)}}}: give a number, zero or more"
                f"{f' and at most {MOST_FACTOR:g}' if self.optimizer_factor > 0 else ''}"
            )
        if self.model not in COST_MODELS:
            raise ChainError(
                f"partition{{model={self.model}}}: give one of {', '.join(COST_MODELS)}"
                f"{suggest(self.model, COST_MODELS)}"
            )
        if not self.time_limit > 0:
            raise ChainError(f"partition{{time_limit={self.time_limit}}}: give seconds, more than zero")
        if self.recompute not in RECOMPUTE:
            hint = suggest(self.recompute, RECOMPUTE)
            raise ChainError(f"partition{{recompute={self.recompute}}}: give one of {', '.join(RECOMPUTE)}{hint}")
        if self.objective not in OBJECTIVES:
            hint = suggest(self.objective, OBJECTIVES)
            raise ChainError(f"partition{{objective={self.objective}}}: give one of {', '.join(OBJECTIVES)}{hint}")
        if self.free and self.model == "replicated":
            raise ChainError(
                "partition{free=true,model=replicated}: replicated stages take neighbours; drop one of them"
            )

    @property
    def costs(self) -> CostModel:
        """The cost model of these options."""
        return CostModel(self.model, self.traffic, self.optimizer_factor)


@dataclass(frozen=True, eq=False)
class Task:
    """A planning task: costs of a graph, devices, the schedule's workload, options and constraints.

    `pinned` maps nodes to the number of their device. No stage boundary may lie right after a set of nodes in `never`.
    """

    costs: Costs
    machine: Machine
    workload: Workload
    options: Options = Options()
    pinned: Mapping[str, int] = field(default_factory=dict)
    never: tuple[frozenset[str], ...] = ()

    @cached_property
    def interchangeable(self) -> bool:
        """Whether a plan stays equally good if its stages swap devices."""
        return self.options.free or (self.machine.uniform and not self.pinned)

    @property
    def idle(self) -> str:
        """The devices that may stay idle without excluding the best plan: "none", "last" or "any" (see list_moves)."""
        # Among equal devices it makes no difference which are idle. And if stages may have no nodes, such a stage takes
        # the place of an idle device between others: it only passes values on.
        alike = self.interchangeable or self.workload.may_idle
        return "none" if self.options.use_all else "last" if alike else "any"

    def choose_idle(self, n_states: int) -> str:
        """Return the devices that a search may leave idle: as `idle`, or "last" if trying all would take too long."""
        n = len(self.machine)
        # With bounded memory there is one search for each number of stages, with more configurations in each.
        bounded = self.stage_counts != [None]
        cells = n_states * n * (1 if self.machine.equal_links else 3) * (n * n / 2 if bounded else 1)
        return "last" if self.idle == "any" and cells > (MOST_BOUNDED if bounded else MOST_CELLS) else self.idle

    @cached_property
    def stage_counts(self) -> list[int | None]:
        """The numbers of stages to search one by one, or [None] to search all at once.

        One search is enough if memory is unlimited, or does not depend on the number of stages.
        """
        unlimited = all(not isfinite(d.memory_bytes) for d in self.machine.devices)
        held = bool(self.workload.versions) or any(n.kept_bytes or n.waiting_bytes for n in self.costs.nodes)
        if self.options.costs.forwards:
            held = held or any(n.output_bytes for n in self.costs.nodes)
            held = held or any(i.output_bytes for i in self.costs.inputs)
        if unlimited or not held:
            return [None]
        exactly = self.options.use_all and self.options.model != "replicated"
        return [len(self.machine)] if exactly else list(range(1, len(self.machine) + 1))

    @property
    def recompute(self) -> str:
        """Which stages may recompute: the workload's choice, or "plan" for the option's. Inference never recomputes."""
        if self.workload.inference:
            return "never"
        stated = self.workload.recompute
        return self.options.recompute if stated == "plan" else stated

    @property
    def reduce_ms_per_byte(self) -> float:
        """The time for two replicas of a stage to reduce one byte of gradients, in ms; 0 if stages have no replicas.

        It is an upper bound for any number of replicas.
        """
        if self.options.model != "replicated":
            return 0.0
        return max((self.machine.reduce_ms_per_byte(pair) for pair in pairwise(range(len(self.machine)))), default=0.0)

    def bound_slack_ms(self, slack: Slack) -> float:
        """Return by how many ms the joining of light nodes may have slowed the best plan."""
        return slack.bound_ms(
            twice=self.recompute != "never",
            hosts=any(d.host for d in self.machine.devices),
            speed=min(d.speed for d in self.machine.devices),
            reduce_ms_per_byte=self.reduce_ms_per_byte,
        )


@dataclass(frozen=True)
class SearchResult:
    """The result of a search for the best plan.

    - `best` is the fastest chain, or None if no chain was found
    - `lower` is a load in ms that no plan of the task beats
    - `complete` tells whether the search covered all plans of the task
    - `hurried` tells whether the time ran out for some of the searches
    - `problems` are the problems that were searched
    """

    best: BestChain | None
    lower: float
    complete: bool
    hurried: bool
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Misfit:
    """No plan fits. `explain` finds the reason on demand, since that takes longer than the search itself."""

    task: Task
    chains: Antichains
    outcome: SearchResult
    clock: SearchClock

    def explain(self) -> PlanError:
        """Return the error that names the stage without enough memory, or the contradictory pins."""
        # compile(recompute=) may rule out what the pass would choose.
        planned = self.task.workload.recompute == "plan"
        helps = "partition{recompute=auto}" if planned else "compile(recompute='always')"
        keeps = helps if self.task.recompute == "never" and not self.task.workload.inference else ""
        machine, schedule, outcome = self.task.machine, self.task.workload.schedule, self.outcome
        return explain_misfit(
            outcome.problems,
            self.chains,
            self.task.costs,
            machine,
            schedule,
            self.clock,
            complete=outcome.complete,
            keeps=keeps,
        )


def partition(task: Task, chains: Antichains, states: States, clock: SearchClock | None = None) -> Plan:
    """Return the plan with the smallest bottleneck among these states.

    `clock` is a running clock; by default a new one starts with the option's `time_limit`. Raises PlanError if no plan
    fits, with the stage that lacks memory and by how much.
    """
    plan = find_plan(task, chains, states, clock or SearchClock.limited(task.options.time_limit))
    if isinstance(plan, Misfit):
        raise plan.explain()
    return plan


def find_plan(task: Task, chains: Antichains, states: States, clock: SearchClock) -> Plan | Misfit:
    """Return the plan with the smallest bottleneck among these states, or a Misfit if none fits.

    Raises PlanError if the blocks are too few or the time is too short.
    """
    costs, machine, options = task.costs, task.machine, task.options
    _check_size(task, chains)
    _check_hosts(costs, machine)
    if options.model == "overlapped" and machine.transfers == "blocking":
        raise PlanError(
            "cost model 'overlapped' lets devices compute while their messages are under way, and the machine has "
            "transfers='blocking': use the cost model forwarded"
        )
    outcome = search(task, chains, states, clock)
    best, lower = outcome.best, outcome.lower
    if best is None and outcome.hurried:
        raise PlanError(f"no plan was found within time_limit={options.time_limit} s: allow more time, or fewer states")
    if best is None:
        return Misfit(task, chains, outcome, clock)
    # Price the plan on the graph, by definition: rounding errors in the search's sums then cannot reach the plan.
    priced = price_split(costs, machine, task.workload, _split(costs, chains, best.path), options.costs)
    reached = max(s.load_ms for s in priced)
    if chains.slack is not None:
        # Groups of light nodes may leave a stage empty. So plans with idle devices bound plans that use all devices.
        if options.use_all:
            idle = replace(task, options=replace(options, use_all=False))
            lower = min(lower, search(idle, chains, states, clock, upper=lower).lower)
        lower = max(lower - task.bound_slack_ms(chains.slack), bound_by_work(costs, machine))
    # The bound holds only if the planner itself enumerated the states, with sums of these costs.
    sound = chains.enumerated and isclose(best.load, reached, rel_tol=PROVEN)
    lower = lower if sound else bound_by_work(costs, machine)
    proven = sound and outcome.complete and best.load - lower <= 1e-9 * reached
    bound_ms = reached if proven else min(lower, reached)
    plan = Plan.assemble(
        priced, costs, machine, task.workload, options.costs, lower_bound_ms=bound_ms, n_states=len(chains)
    )
    return plan.prove("search" if proven else "bound")


def search(task: Task, chains: Antichains, states: States, clock: SearchClock, upper: float = inf) -> SearchResult:
    """Return the fastest chain below `upper` ms over all numbers of stages, and a load in ms that no plan beats.

    The memory of a stage depends on the number of stages, so memory limits require one search for each number. First
    search once without limits, which is much faster. If that best chain fits, it is the best of all. Otherwise it
    bounds all chains, and the searches with limits start at its number of stages, because few other numbers beat the
    result.
    """
    bounded = task.stage_counts != [None]
    free = replace(task, machine=task.machine.lift_memory_limits()) if bounded else task
    (problem,) = pose_problems(free, chains, states)
    hurried, best = False, None
    try:
        best = minimise(problem, chains, clock.halve() if bounded else clock, upper=upper)
    except OutOfTime:
        hurried = True
    every = chains.complete and free.choose_idle(len(states)) == free.idle
    lower = _bound(free, problem, best, chains, states, upper=upper, hurried=hurried)
    if not bounded or (best is None and not hurried) or (best is not None and _fits(task, chains, best.path)):
        # The explanation of a misfit needs the problems with their memory limits.
        failed = best is None and upper == inf and bounded
        problems = tuple(pose_problems(task, chains, states)) if failed else (problem,)
        return SearchResult(best, lower, every, hurried, problems)
    n_stages = None if best is None else len(best.path)
    return _search_counts(task, chains, states, clock, SearchResult(None, lower, every, hurried, ()), upper, n_stages)


def _search_counts(
    task: Task,
    chains: Antichains,
    states: States,
    clock: SearchClock,
    free: SearchResult,
    upper: float,
    n_stages: int | None,
) -> SearchResult:
    """Search once for each number of stages, nearest to `n_stages` first; return the fastest chain that fits.

    `free` is the outcome of the search without memory limits.
    """
    numbers = [n for n in task.stage_counts if n is not None]
    counts = sorted(numbers, key=lambda n: (abs(n - (n_stages or numbers[-1])), -n))
    best: BestChain | None = None
    least, hurried, posed = inf, False, []
    for problem in pose_problems(task, chains, states, counts):
        # With a plan in hand, skip the remaining numbers when the time is over.
        if best is not None and clock.over:
            least = free.lower
            break
        posed.append(problem)
        # Prefer fewer stages at equal load: a device stays idle unless it makes the plan faster.
        fewer = best is not None and problem.moves.n_stages < len(best.path)
        limit = upper if best is None else best.load * (1 + 2 * SLACK) if fewer else best.load
        try:
            if best is None and not may_fit(problem, chains, clock):
                continue
            found = minimise(problem, chains, clock, lower=free.lower, upper=limit)
        except OutOfTime:
            hurried, least = True, min(least, free.lower, problem.lower_bound())
            continue
        if found is not None:
            best, least = found, min(least, found.lower)
    # A search of only some states, or only some sets of idle devices, gives no lower bound for all plans.
    complete = chains.complete and task.choose_idle(len(states)) == task.idle
    lower = max(free.lower, min(least, upper)) if complete else free.lower
    return SearchResult(best, lower, complete, hurried, tuple(posed))


def _bound(
    task: Task,
    problem: Problem,
    best: BestChain | None,
    chains: Antichains,
    states: States,
    *,
    upper: float,
    hurried: bool,
) -> float:
    """Return a load in ms that no plan beats, including plans outside the search for `best` below `upper`."""
    least = bound_by_work(task.costs, task.machine)
    # A search that leaves only the last devices idle gives no bound for plans with other idle devices.
    if task.choose_idle(len(states)) != task.idle:
        return least
    if not chains.complete:
        # The states of one topological order give no bound for plans of other orders.
        if chains.levels is None:
            return max(least, problem.lower_bound())
        return max(least, level_bound(problem, chains.levels, upper if best is None else best.load))
    if best is None:
        return max(least, problem.lower_bound()) if hurried else upper
    return max(least, best.lower)


def _fits(task: Task, chains: Antichains, path: Path) -> bool:
    """Return whether every stage of a chain fits in the memory of its devices."""
    devices = task.machine.devices
    stages = price_split(task.costs, task.machine, task.workload, _split(task.costs, chains, path), task.options.costs)
    return all(stage.memory_bytes <= devices[d].memory_bytes for stage in stages for d in stage.devices)


def bound_by_work(costs: Costs, machine: Machine) -> float:
    """Return a load in ms that no plan beats.

    It is all work divided by the speed of all devices, or all launches divided by the number of devices. It is 0 if a
    device is itself a host, since the ratio of host time to device time differs for each node.
    """
    if any(d.host for d in machine.devices):
        return 0.0
    return max(costs.compute_ms / sum(d.speed for d in machine.devices), costs.launch_ms / len(machine))


def _split(costs: Costs, chains: Antichains, path: Path) -> Split:
    """Return the stages of a chain of states, each with its nodes in graph order, devices and recompute flag."""
    nodes = split_nodes(costs, chains, [end for end, _ in path])
    return [(names, move.devices, move.recompute) for names, (_, move) in zip(nodes, path, strict=True)]


def split_nodes(costs: Costs, chains: Antichains, ends: Sequence[int]) -> list[list[str]]:
    """Return the nodes of each stage in graph order, from the ideals at which the stages end."""
    # Go from the last stage to the first, so that a block ends up in the first stage that contains it.
    stage_of = {b: stage for stage in reversed(range(len(ends))) for b in chains.ideal(ends[stage])}
    nodes: list[list[str]] = [[] for _ in ends]
    for node in costs.nodes:
        nodes[stage_of[chains.blocks.home[node.name]]].append(node.name)
    return nodes


def pose_problems(
    task: Task, chains: Antichains, states: States, counts: Sequence[int | None] | None = None
) -> Iterator[Problem]:
    """Yield the search problems: one for each number of stages, or one for all. The best chain over all is the plan.

    `counts` are numbers of stages in the order to search them; by default all that the task allows.
    """
    # A stage's memory depends on the schedule, and so on the number of stages after it.
    machine, options, pinned = task.machine, task.options, task.pinned
    idle = task.choose_idle(len(states))
    for n_stages in task.stage_counts if counts is None else counts:
        replicated = options.model == "replicated"
        # In a free order, equal devices share one type, unless a node is pinned to one of them.
        named = frozenset(pinned.values())
        moves = list_moves(machine, replicated, idle, options.free, n_stages, task.recompute, named)
        if not moves.final:
            continue
        problem = pose_problem(task.costs, states, chains, machine, task.workload, options.costs, moves, pinned)
        for names in task.never:
            problem.tables.allowed[:, _number(chains, names)] = False
        if not options.costs.forwards:
            problem = pose_direct(
                problem, task.costs, chains, machine, options.costs, interchangeable=task.interchangeable
            )
        yield problem


def _number(chains: Antichains, names: frozenset[str]) -> list[int]:
    """Return the number of the ideal with exactly these nodes as a list, or [] if no such ideal exists."""
    # Walk up from the empty ideal one block at a time: each ascending prefix of an ideal is an ideal.
    at = 0
    for block in sorted({chains.blocks.home[name] for name in names}):
        edges = slice(int(chains.pointer[at]), int(chains.pointer[at + 1]))
        found = chains.child[edges][chains.node[edges] == block]
        if not found.size:
            return []
        at = int(found[0])
    return [at]


def _check_hosts(costs: Costs, machine: Machine) -> None:
    """Raise PlanError for a host device if the costs have no times on hosts, which would all count as 0."""
    host = next((device.name for device in machine.devices if device.host), None)
    if host is not None and costs.compute_ms and not any(node.host_ms for node in costs.nodes):
        raise PlanError(
            f"device {host!r} is a host, and the profile has no times on hosts (host_ms): leave host = true out, and "
            "state its speed, or give a profile with both times, as dnn-partitioning files have"
        )


def _check_size(task: Task, chains: Antichains) -> None:
    """Raise TooFewParts if every device must have a stage and the blocks are too few for that."""
    blocks, options = len(chains.blocks), task.options
    if len(task.machine) <= blocks or task.workload.may_idle or not options.use_all or options.model == "replicated":
        return
    if not chains.blocks.members:
        raise PlanError(
            "the graph has no nodes, so there is nothing to plan: give a model that computes its outputs; "
            "a model that returns its inputs, as nn.Identity does, needs no pipeline"
        )
    largest = max(chains.blocks.members, key=len)
    joined = (
        f" ({len(task.costs.nodes)} before those that must stay together were joined; the largest group has "
        f"{len(largest)}, {largest[0]!r} .. {largest[-1]!r}, which share a parameter or memory, were asked to "
        "stay together, or lie between nodes that do)"
    )
    way = f"use {blocks} devices or fewer, with a stage each, or leave some idle (partition{{use_all=false}})"
    if task.machine.homes:
        way = (
            f"{task.workload.schedule} needs all of its stages, so use fewer than {len(task.machine.real)} devices, or "
            "a schedule with one stage a device, such as 1F1B"
        )
    raise TooFewParts(
        f"a plan of {len(task.machine)} stages, and the graph has only {blocks} nodes that cuts can separate"
        f"{joined if len(largest) > 1 else ''}: {way}"
    )
