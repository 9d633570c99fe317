"""From states, machine and options to a plan: pose the search problems, solve them, price the best chain."""

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
from fxsplit.planner.clock import Clock, OutOfTime
from fxsplit.planner.direct import pose_direct
from fxsplit.planner.no_plan import explain_misfit
from fxsplit.planner.problem.moves import list_moves
from fxsplit.planner.problem.problem import Path, Problem, pose_problem
from fxsplit.planner.search.bounds import level_bound
from fxsplit.planner.search.search import SLACK, Found, may_fit, minimise
from fxsplit.system.figures import show

RECOMPUTE = ("never", "always", "auto")
MOST_CELLS, MOST_BOUNDED = 2**26, 2**25
"""Configurations times states above which a search leaves only the last devices idle: without limits of memory, and
with them, where each takes longer. The plan then has a gap."""
MOST_FACTOR = 1e3
"""More bytes of optimizer state per byte of parameters are refused as a mistake."""


@dataclass(frozen=True)
class Options:
    """What a plan may be, and how long the search may take.

    - `use_all` asks for a stage on every device; without it any device may stay idle where using it is not faster
    - `optimizer_factor` is the bytes of optimizer state per byte of parameters: 2 for Adam, 1 for momentum, 0 for SGD
    - `model` is what stages pay for, and `traffic` whether transfers are priced (see CostModel)
    - `free` takes the devices in any order, not in the machine's
    - `time_limit` is in seconds; then the best plan so far comes with its gap
    - `recompute`: "always" lets every stage keep no activations and run forward again, "auto" those that would not fit
      or would be slower otherwise, "never" none

    Raises ChainError for a value that is none of these.
    """

    use_all: bool = True
    optimizer_factor: float = 2.0
    model: str = "forwarded"
    traffic: bool = True
    free: bool = False
    time_limit: float = inf
    recompute: str = "never"

    def __post_init__(self) -> None:
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
        if self.free and self.model == "replicated":
            raise ChainError(
                "partition{free=true,model=replicated}: replicated stages take neighbours; drop one of them"
            )

    @property
    def costs(self) -> CostModel:
        """The cost model that these options state."""
        return CostModel(self.model, self.traffic, self.optimizer_factor)


@dataclass(frozen=True, eq=False)
class Task:
    """What to plan: a measured graph, the devices, what their schedule asks of them, and what a plan must respect.

    `pinned` maps nodes to the number of their device. No boundary between stages lies right behind a set in `never`.
    """

    costs: Costs
    machine: Machine
    workload: Workload
    options: Options = Options()
    pinned: Mapping[str, int] = field(default_factory=dict)
    never: tuple[frozenset[str], ...] = ()

    @cached_property
    def interchangeable(self) -> bool:
        """Whether a plan stays as good when its stages move to other devices."""
        return self.options.free or (self.machine.uniform and not self.pinned)

    @property
    def idle(self) -> str:
        """Which devices may be left idle (see list_moves), so that no plan is better than the best of these."""
        # Where devices are alike it makes no difference which are idle. A stage without a node is no idle device.
        alike = self.interchangeable or self.workload.may_idle
        return "none" if self.options.use_all else "last" if alike else "any"

    def choose_idle(self, n_states: int) -> str:
        """Return which devices a search leaves idle: fewer than could be, where to try all takes too long."""
        n = len(self.machine)
        # Where a configuration counts stages there is one for each number, in a search for each number.
        bounded = self.stage_counts != [None]
        cells = n_states * n * (3 if len(set(self.machine.links)) > 1 else 1) * (n * n / 2 if bounded else 1)
        return "last" if self.idle == "any" and cells > (MOST_BOUNDED if bounded else MOST_CELLS) else self.idle

    @cached_property
    def stage_counts(self) -> list[int | None]:
        """The numbers of stages to plan for; None is all at once, if memory does not depend on the number."""
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
        """Which stages may recompute: as the workload states, else as the options allow; without backwards none."""
        if self.workload.inference:
            return "never"
        stated = self.workload.recompute
        return self.options.recompute if stated == "plan" else stated

    @property
    def reduce_ms_per_byte(self) -> float:
        """What two replicas of a stage take to sum a byte of gradients, which no number of replicas exceeds; else 0."""
        if self.options.model != "replicated":
            return 0.0
        return max((self.machine.reduce_ms_per_byte(pair) for pair in pairwise(range(len(self.machine)))), default=0.0)

    def bound_slack_ms(self, slack: Slack) -> float:
        """Return how many ms slower the best plan may have become because light nodes were joined."""
        return slack.bound_ms(
            twice=self.recompute != "never",
            hosts=any(d.host for d in self.machine.devices),
            speed=min(d.speed for d in self.machine.devices),
            reduce_ms_per_byte=self.reduce_ms_per_byte,
        )


@dataclass(frozen=True)
class Outcome:
    """What a search for the best plan has come to.

    `best` is the fastest chain, None if no chain was found. No plan that the task allows beats `lower` ms. `complete`
    tells whether all plans that the task allows were searched, `hurried` whether the time was too short for some.
    `problems` are the problems that were searched.
    """

    best: Found | None
    lower: float
    complete: bool
    hurried: bool
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Misfit:
    """No plan fits. To find out why takes longer than to find that out, and is done only if a user is told."""

    task: Task
    chains: Antichains
    outcome: Outcome
    clock: Clock

    def explain(self) -> PlanError:
        """Return the error that says by how much, and where."""
        keeps = self.task.recompute == "never" and not self.task.workload.inference
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


def partition(task: Task, chains: Antichains, states: States, clock: Clock | None = None) -> Plan:
    """Return the plan among these states whose slowest stage is fastest.

    Raises PlanError when none fits, saying by how much and where. `clock` is one that runs already, if not a new one.
    """
    plan = find_plan(task, chains, states, clock or Clock.limited(task.options.time_limit))
    if isinstance(plan, Misfit):
        raise plan.explain()
    return plan


def find_plan(task: Task, chains: Antichains, states: States, clock: Clock) -> Plan | Misfit:
    """Return the plan among these states whose slowest stage is fastest, or what tells why none fits.

    Raises PlanError if there are too few blocks, or too little time.
    """
    costs, machine, options = task.costs, task.machine, task.options
    _check_size(task, chains)
    outcome = search(task, chains, states, clock)
    best, lower = outcome.best, outcome.lower
    if best is None and outcome.hurried:
        raise PlanError(f"no plan was found within time_limit={options.time_limit} s: allow more time, or fewer states")
    if best is None:
        return Misfit(task, chains, outcome, clock)
    # Price from the definition, on the graph: so no error of the search's sums reaches the plan.
    priced = price_split(costs, machine, task.workload, _split(costs, chains, best.path), options.costs)
    reached = max(s.load_ms for s in priced)
    if chains.slack is not None:
        # Keeping light nodes together may empty a stage, so plans that leave devices idle bound those that do not.
        if options.use_all:
            idle = replace(task, options=replace(options, use_all=False))
            lower = min(lower, search(idle, chains, states, clock, upper=lower).lower)
        lower = max(lower - task.bound_slack_ms(chains.slack), bound_by_work(costs, machine))
    # What the search says holds of these costs only if the states are the planner's own, and sum up these costs.
    sound = chains.enumerated and isclose(best.load, reached, rel_tol=PROVEN)
    lower = lower if sound else bound_by_work(costs, machine)
    proven = sound and outcome.complete and best.load - lower <= 1e-9 * reached
    bound_ms = reached if proven else min(lower, reached)
    plan = Plan.of(priced, costs, machine, task.workload, options.costs, lower_bound_ms=bound_ms, n_states=len(chains))
    return plan.prove("search" if proven else "bound")


def search(task: Task, chains: Antichains, states: States, clock: Clock, upper: float = inf) -> Outcome:
    """Return the fastest chain below `upper` ms over all numbers of stages, and a load in ms that no plan beats.

    What a stage holds depends on how many stages there are, so limits of memory take a search for each number. Without
    these limits one search is enough, which is much faster. Its best chain bounds all others, and is the best of all if
    it fits. If it does not fit, the other searches begin with its number of stages: few chains beat what they find.
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
        # The reason why nothing fits is asked of the problems with their limits.
        failed = best is None and upper == inf and bounded
        problems = tuple(pose_problems(task, chains, states)) if failed else (problem,)
        return Outcome(best, lower, every, hurried, problems)
    n_stages = None if best is None else len(best.path)
    return _search_counts(task, chains, states, clock, Outcome(None, lower, every, hurried, ()), upper, n_stages)


def _search_counts(
    task: Task,
    chains: Antichains,
    states: States,
    clock: Clock,
    free: Outcome,
    upper: float,
    n_stages: int | None,
) -> Outcome:
    """Return the fastest chain that fits, from a search for each number of stages, those near to `n_stages` first.

    `free` is what a search without limits of memory has come to.
    """
    numbers = [n for n in task.stage_counts if n is not None]
    counts = sorted(numbers, key=lambda n: (abs(n - (n_stages or numbers[-1])), -n))
    best: Found | None = None
    least, hurried, posed = inf, False, []
    for problem in pose_problems(task, chains, states, counts):
        # With a plan at hand the rest of the numbers is not looked at.
        if best is not None and clock.over:
            least = free.lower
            break
        posed.append(problem)
        # A device stays idle unless it makes the plan faster: fewer stages win if they are as fast.
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
    # A search among some states, or some ways to leave devices out, bounds no others.
    complete = chains.complete and task.choose_idle(len(states)) == task.idle
    lower = max(free.lower, min(least, upper)) if complete else free.lower
    return Outcome(best, lower, complete, hurried, tuple(posed))


def _bound(
    task: Task, problem: Problem, best: Found | None, chains: Antichains, states: States, *, upper: float, hurried: bool
) -> float:
    """Return a load in ms that no plan beats, also none that the search for `best` below `upper` did not look at."""
    least = bound_by_work(task.costs, task.machine)
    # A search that leaves only the last devices idle says nothing of plans that leave others idle.
    if task.choose_idle(len(states)) != task.idle:
        return least
    if not chains.complete:
        # The states of one order say nothing of others.
        if chains.levels is None:
            return max(least, problem.lower_bound())
        return max(least, level_bound(problem, chains.levels, upper if best is None else best.load))
    if best is None:
        return max(least, problem.lower_bound()) if hurried else upper
    return max(least, best.lower)


def _fits(task: Task, chains: Antichains, path: Path) -> bool:
    """Return whether every stage of a chain fits into the memory of its devices."""
    devices = task.machine.devices
    stages = price_split(task.costs, task.machine, task.workload, _split(task.costs, chains, path), task.options.costs)
    return all(stage.memory_bytes <= devices[d].memory_bytes for stage in stages for d in stage.devices)


def bound_by_work(costs: Costs, machine: Machine) -> float:
    """Return a load in ms that no plan beats: all work, shared among the devices by their speed, or all launches.

    A host takes other times for each node, so with hosts nothing is known.
    """
    if any(d.host for d in machine.devices):
        return 0.0
    return max(costs.compute_ms / sum(d.speed for d in machine.devices), costs.launch_ms / len(machine))


def _split(costs: Costs, chains: Antichains, path: Path) -> Split:
    """Return the stages of a chain of states, each with its nodes in graph order."""
    # From the last stage to the first: a block belongs to the first state that holds it.
    stage_of = {b: stage for stage in reversed(range(len(path))) for b in chains.ideal(path[stage][0])}
    nodes: list[list[str]] = [[] for _ in path]
    for node in costs.nodes:
        nodes[stage_of[chains.blocks.home[node.name]]].append(node.name)
    return [(names, move.devices, move.recompute) for names, (_, move) in zip(nodes, path, strict=True)]


def pose_problems(
    task: Task, chains: Antichains, states: States, counts: Sequence[int | None] | None = None
) -> Iterator[Problem]:
    """Yield the search problems of which the best answer is the plan: one for each number of stages, or one for all.

    `counts` are the numbers of stages in the order to search them, all that the task allows if not given.
    """
    # What a stage holds in memory depends on the schedule, and so on how many stages come after it.
    machine, options, pinned = task.machine, task.options, task.pinned
    idle = task.choose_idle(len(states))
    for n_stages in task.stage_counts if counts is None else counts:
        replicated = options.model == "replicated"
        # Equal devices are one type in a free order, unless something is pinned to one of them.
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
    """Return the number of the ideal with exactly these nodes, in a list, or an empty list where there is none."""
    # Walk up from the empty ideal, one block at a time: ascending, every prefix of an ideal is an ideal.
    at = 0
    for block in sorted({chains.blocks.home[name] for name in names}):
        edges = slice(int(chains.pointer[at]), int(chains.pointer[at + 1]))
        found = chains.child[edges][chains.node[edges] == block]
        if not found.size:
            return []
        at = int(found[0])
    return [at]


def _check_size(task: Task, chains: Antichains) -> None:
    """Raise PlanError where every device is to have a stage and there are not enough blocks."""
    blocks, options = len(chains.blocks), task.options
    if len(task.machine) <= blocks or task.workload.may_idle or not options.use_all or options.model == "replicated":
        return
    if not chains.blocks.members:
        raise PlanError(
            "the graph has no nodes, so there is nothing to plan: give a model that computes its outputs; "
            "one that hands its inputs on, as nn.Identity does, needs no pipeline"
        )
    largest = max(chains.blocks.members, key=len)
    joined = (
        f" ({len(task.costs.nodes)} before those that must stay together were joined; the largest group has "
        f"{len(largest)}, {largest[0]!r} .. {largest[-1]!r}, which share a parameter or memory, were asked to "
        "stay together, or lie between nodes that do)"
    )
    raise TooFewParts(
        f"a plan of {len(task.machine)} stages, and the graph has only {blocks} nodes that can be parted"
        f"{joined if len(largest) > 1 else ''}: use {blocks} devices or fewer, with a stage each, or leave some idle "
        "(partition{use_all=false})"
    )
