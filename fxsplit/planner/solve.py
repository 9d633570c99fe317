"""From states, machine and options to a plan: pose the search problems, solve them, price the best chain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import inf, isclose, isfinite

from fxsplit.errors import ChainError, PlanError, TooFewParts
from fxsplit.ir.facts.antichains import Antichains, Slack
from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.figures import show
from fxsplit.ir.facts.machine import Machine
from fxsplit.ir.facts.plan import PROVEN, Plan
from fxsplit.ir.facts.price import COST_MODELS, CostModel, Split, price_split
from fxsplit.ir.facts.states import States
from fxsplit.ir.facts.workload import Workload
from fxsplit.planner.bounds import level_bound
from fxsplit.planner.clock import Clock, OutOfTime
from fxsplit.planner.direct import pose_direct
from fxsplit.planner.moves import list_moves
from fxsplit.planner.no_plan import explain_misfit
from fxsplit.planner.problem import Path, Problem, pose_problem
from fxsplit.planner.search import Found, minimise

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
            raise ChainError(f"partition{{model={self.model}}}: give one of {', '.join(COST_MODELS)}")
        if not self.time_limit > 0:
            raise ChainError(f"partition{{time_limit={self.time_limit}}}: give seconds, more than zero")
        if self.recompute not in RECOMPUTE:
            raise ChainError(f"partition{{recompute={self.recompute}}}: give one of {', '.join(RECOMPUTE)}")
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
        bounded = _stage_counts(self.costs, self.workload, self.machine, self.options) != [None]
        cells = n_states * n * (3 if len(set(self.machine.links)) > 1 else 1) * (n * n / 2 if bounded else 1)
        return "last" if self.idle == "any" and cells > (MOST_BOUNDED if bounded else MOST_CELLS) else self.idle

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


def partition(task: Task, chains: Antichains, states: States, clock: Clock | None = None) -> Plan:
    """Return the plan among these states whose slowest stage is fastest.

    Raises PlanError when none fits, saying by how much and where. `clock` is one that runs already, if not a new one.
    """
    costs, machine, options = task.costs, task.machine, task.options
    _check_size(task, chains)
    # A lower bound holds for all plans only if it is the smallest of the bounds for every number of stages.
    clock = clock or Clock.limited(options.time_limit)
    best: Found | None = None
    lower, hurried = inf, False
    posed = []
    complete = chains.complete and task.choose_idle(len(states)) == task.idle
    for problem in pose_problems(task, chains, states):
        # With a plan at hand the rest of the numbers is not looked at, and the work alone bounds their plans.
        if best is not None and clock.over:
            lower = min(lower, bound_by_work(costs, machine))
            break
        posed.append(problem)
        try:
            found = minimise(problem, chains, clock)
        except OutOfTime:
            hurried, found = True, None
            lower = min(lower, problem.lower_bound())
        # The bound of a search among some states, or some ways to leave devices out, says nothing of others.
        if complete:
            lower = min(lower, inf if found is None else found.lower)
        if found is not None and (best is None or found.load < best.load):
            best = found
    if best is None and hurried:
        raise PlanError(f"no plan was found within time_limit={options.time_limit} s: allow more time, or fewer states")
    if best is None:
        keeps = task.recompute == "never" and not task.workload.inference
        raise explain_misfit(posed, chains, machine, task.workload.schedule, clock, complete=complete, keeps=keeps)
    if task.choose_idle(len(states)) != task.idle:
        lower = min(lower, _bound_any_idle(task, chains, states, clock))
    elif not chains.complete:
        lower = min(lower, *(_bound(problem, chains, best.load) for problem in posed))
    # Price from the definition, on the graph: so no error of the search's sums reaches the plan.
    priced = price_split(costs, machine, task.workload, _split(costs, chains, best.path), options.costs)
    reached = max(s.load_ms for s in priced)
    if chains.slack is not None:
        # Keeping light nodes together may empty a stage, so plans that leave devices idle bound those that do not.
        idle = list(pose_problems(replace(task, options=replace(options, use_all=False)), chains, states))
        bounds = [_lower_bound(p, chains, clock) for p in idle]
        lower = max(min([lower, *bounds]) - task.bound_slack_ms(chains.slack), bound_by_work(costs, machine))
    # What the search says holds of these costs only if the states are the planner's own, and sum up these costs.
    sound = chains.enumerated and isclose(best.load, reached, rel_tol=PROVEN)
    lower = lower if sound else bound_by_work(costs, machine)
    proven = sound and complete and best.load - lower <= 1e-9 * reached
    bound_ms = reached if proven else min(lower, reached)
    plan = Plan.of(priced, costs, machine, task.workload, options.costs, lower_bound_ms=bound_ms, n_states=len(chains))
    return plan.prove("search" if proven else "bound")


def bound_by_work(costs: Costs, machine: Machine) -> float:
    """Return a load in ms that no plan beats: all work, shared among the devices by their speed, or all launches.

    A host takes other times for each node, so with hosts nothing is known.
    """
    if any(d.host for d in machine.devices):
        return 0.0
    return max(costs.compute_ms / sum(d.speed for d in machine.devices), costs.launch_ms / len(machine))


def _bound(problem: Problem, chains: Antichains, load: float) -> float:
    """Return a load in ms that no chain beats, also none of states that were not enumerated."""
    return problem.lower_bound() if chains.levels is None else level_bound(problem, chains.levels, load)


def _bound_any_idle(task: Task, chains: Antichains, states: States, clock: Clock) -> float:
    """Return a load in ms that no plan beats, whichever devices it leaves idle: the best load if memory were free."""
    devices = tuple(replace(d, memory_bytes=inf) for d in task.machine.devices)
    unbounded = replace(task, machine=replace(task.machine, devices=devices))
    least = bound_by_work(task.costs, task.machine)
    # The states of one order, and searches that leave only the last devices idle, say nothing of others.
    if not chains.complete or unbounded.choose_idle(len(states)) != unbounded.idle:
        return least
    problems = pose_problems(unbounded, chains, states)
    return max(least, min(_lower_bound(problem, chains, clock) for problem in problems))


def _lower_bound(problem: Problem, chains: Antichains, clock: Clock) -> float:
    """Return a load in ms that no chain of a problem beats, infinite where no chain exists."""
    try:
        found = minimise(problem, chains, clock)
    except OutOfTime:
        return problem.lower_bound()
    return inf if found is None else found.lower


def _split(costs: Costs, chains: Antichains, path: Path) -> Split:
    """Return the stages of a chain of states, each with its nodes in graph order."""
    # From the last stage to the first: a block belongs to the first state that holds it.
    stage_of = {b: stage for stage in reversed(range(len(path))) for b in chains.ideal(path[stage][0])}
    nodes: list[list[str]] = [[] for _ in path]
    for node in costs.nodes:
        nodes[stage_of[chains.blocks.home[node.name]]].append(node.name)
    return [(names, move.devices, move.recompute) for names, (_, move) in zip(nodes, path, strict=True)]


def pose_problems(task: Task, chains: Antichains, states: States) -> Iterator[Problem]:
    """Yield the search problems of which the best answer is the plan: one for each number of stages, or one for all."""
    # What a stage holds in memory depends on the schedule, and so on how many stages come after it.
    machine, options, pinned = task.machine, task.options, task.pinned
    idle = task.choose_idle(len(states))
    for n_stages in _stage_counts(task.costs, task.workload, machine, options):
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


def _stage_counts(costs: Costs, workload: Workload, machine: Machine, options: Options) -> list[int | None]:
    """Return the numbers of stages to plan for; None is all at once, where memory does not depend on the number."""
    unlimited = all(not isfinite(d.memory_bytes) for d in machine.devices)
    held = bool(workload.versions) or any(n.kept_bytes or n.waiting_bytes for n in costs.nodes)
    if options.costs.forwards:
        held = held or any(n.output_bytes for n in costs.nodes) or any(i.output_bytes for i in costs.inputs)
    if unlimited or not held:
        return [None]
    exactly = options.use_all and options.model != "replicated"
    return [len(machine)] if exactly else list(range(1, len(machine) + 1))


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
