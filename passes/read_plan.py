"""plan, split: take stages that a file or a person states, and compute their times and memory; learns Plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fxsplit.errors import ChainError, PlanError
from fxsplit.formats.plan_json import read_plan
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.pins import Pins
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import price_split
from fxsplit.ir.facts.split import spread_split
from fxsplit.ir.graph import IR
from fxsplit.schedule.generators.catalogue import SEARCH, Scheduler
from fxsplit.schedule.of_plan import find_replicas
from fxsplit.schedule.schedule_plan import order_replicas, take_schedule
from fxsplit.schedule.torch_csv import parse_csv
from fxsplit.system.user_lines import warn_user


@dataclass(frozen=True)
class ReadPlan:
    """Take the stages of the plan in a file, as `fxsplit plan --json` writes it: `profile,plan{file=plan.json},emit`.

    Times and memory are computed again, from the present costs. The plan is called optimal only if they are the same as
    in the file, since its lower bound holds for the costs that it was made from.
    """

    file: str = ""

    name: ClassVar[str] = "plan"
    ignores_mode: ClassVar[bool] = True
    needs: ClassVar[tuple[type, ...]] = (Costs, Machine, Workload)
    learns: ClassVar[tuple[type, ...]] = (Plan,)
    ignores_graph: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.file:
            raise ChainError("plan{file=}: give the file of a plan, as 'fxsplit plan --json' writes it")

    def __call__(self, ir: IR) -> IR:
        """Learn Plan from Costs. Raises PlanError for a file without a plan, and for a plan of another graph."""
        return take_plan(ir, read_plan(self.file), self.file)


@dataclass(frozen=True)
class SplitBy:
    """Take the stages that a person states: `profile,split{parts=[[layer1,layer2],[head]]},emit`.

    Each part has the submodules and nodes of a stage; a node that nobody names is in the stage of the latest of its
    inputs.
    """

    parts: tuple[tuple[str, ...], ...] = ()

    name: ClassVar[str] = "split"
    ignores_mode: ClassVar[bool] = True
    ignores_graph: ClassVar[bool] = True
    needs: ClassVar[tuple[type, ...]] = (Costs, Machine, Workload)
    learns: ClassVar[tuple[type, ...]] = (Plan,)

    def __call__(self, ir: IR) -> IR:
        """Learn Plan from Costs. Raises PlanError for names that the graph lacks, and for a split that cannot run."""
        return ir.learn(Plan.of(ir, self.parts))


@dataclass(frozen=True)
class TakePlan:
    """Take the stages of a Plan. `compile(plan=)` puts this pass into the chain; a chain in text cannot state it."""

    plan: Plan

    name: ClassVar[str] = "take-plan"
    ignores_mode: ClassVar[bool] = True
    ignores_graph: ClassVar[bool] = True
    needs: ClassVar[tuple[type, ...]] = (Costs, Machine, Workload)
    learns: ClassVar[tuple[type, ...]] = (Plan,)

    def __call__(self, ir: IR) -> IR:
        """Learn Plan from Costs. Raises PlanError for a plan of another graph."""
        return take_plan(ir, self.plan, "plan=")


def take_plan(ir: IR, plan: Plan, name: str) -> IR:
    """Learn `plan`, with times and memory from the present facts, and the schedule if the plan states one.

    The stated schedule is taken only if it has the name and the number of microbatches of the workload; otherwise the
    user is warned. `name` is the plan's name in messages. Raises PlanError for a plan of another graph, ScheduleError
    for a damaged schedule.
    """
    made, workload = price_again(ir, plan, name), ir[Workload]
    if not plan.schedule_csv:
        return ir.learn(made)
    if (plan.schedule, plan.n_microbatches) != (workload.schedule, workload.n_microbatches):
        warn_user(
            f"{name} states the order of work of {plan.schedule} with {plan.n_microbatches} microbatches, and this is "
            f"{workload.schedule} with {workload.n_microbatches}, which is run: to run that of the plan, give "
            f"schedule={plan.schedule!r} and n_microbatches={plan.n_microbatches}"
        )
        if workload.schedule == SEARCH and find_replicas(made) is not None:
            planned, scheduled = order_replicas(made, ir[Costs], ir[Machine], workload)
            return ir.learn(scheduled, planned)
        return ir.learn(made)
    schedule = parse_csv(plan.schedule_csv, plan.schedule)
    if schedule.n_stages != len(made.stages):
        raise PlanError(f"{name} has {len(made.stages)} stages, and its schedule {schedule.n_stages}")
    planned, scheduled = take_schedule(made, Scheduler.of(schedule), ir[Costs], ir[Machine], workload)
    return ir.learn(scheduled, planned)


def price_again(ir: IR, plan: Plan, name: str) -> Plan:
    """Return `plan` with times and memory from the facts of `ir`; `name` is the plan's name in messages.

    The graphs of training and evaluation differ in nodes without weights, such as dropouts. If one of them has been
    compiled before, its weights are pinned. A node that the plan does not know is then in the stage of the latest of
    the node's inputs. Raises PlanError for a plan of other nodes, or of more devices.
    """
    costs, machine, workload = ir[Costs], ir[Machine], ir[Workload]
    known = plan.stage_of()
    odd = [n.name for n in costs.nodes if n.name not in known] + [n for n in known if n not in costs.by_name]
    if odd and ir.get(Pins) is None:
        where = "the plan" if odd[0] in known else "the graph"
        raise PlanError(f"{name} is a plan of another graph: only {where} has node {odd[0]!r}")
    most = max(d for stage in plan.stages for d in stage.devices)
    if most >= len(machine):
        of = "" if plan.schedule == workload.schedule else f"; it was made for schedule={plan.schedule!r}"
        raise PlanError(f"{name} is a plan for {most + 1} devices or more, and there are {len(machine)}{of}")
    stage_of = spread_split(costs, {n: stage for n, stage in known.items() if n in costs.by_name})
    parts = [[n.name for n in costs.nodes if stage_of[n.name] == number] for number in range(len(plan.stages))]
    recompute = {"always": True, "never": False}.get(workload.recompute)  # None: as the plan says
    split = [
        (names, stage.devices, stage.recompute if recompute is None else recompute)
        for names, stage in zip(parts, plan.stages, strict=True)
    ]
    priced = tuple(price_split(costs, machine, workload, split, plan.model))
    made = Plan.assemble(
        priced, costs, machine, workload, plan.model, lower_bound_ms=plan.lower_bound_ms, n_states=plan.n_states
    )
    same = [s.load_ms for s in priced] == [s.load_ms for s in plan.stages] and made.single_ms == plan.single_ms
    # A bound for other costs is no bound for these, and a bound of the step is for one number of microbatches.
    order = (plan.schedule, plan.n_microbatches) == (workload.schedule, workload.n_microbatches)
    if not same or (plan.minimised == "step" and not order):
        return replace(made, lower_bound_ms=0.0, n_states=0)
    step_ms = plan.step_ms if order else None
    return replace(made, step_ms=step_ms, step_lower_bound_ms=plan.step_lower_bound_ms).prove(plan.proof)
