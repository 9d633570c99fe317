"""schedule: search for the schedule with the shortest step for the stages of the plan; learns Workload and Plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxsplit.errors import ChainError, ScheduleError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.graph import IR
from fxsplit.schedule.search_plan import search_for_plan, take_schedule
from fxsplit.schedule.torch_csv import parse_csv
from fxsplit.system.figures import show


@dataclass(frozen=True)
class SearchSchedule:
    """Search for the schedule of a plan's stages, within the memory of their devices: `partition,schedule,emit`.

    - `memory`: how many microbatches a device may hold at most; 0 for as many as its memory has room for
    - `seconds`: the time limit of the search; 0 for 2 s up to 4,000 actions, and 10 s above
    - `seed`: another seed may find another schedule
    """

    memory: float = 0.0
    seconds: float = 0.0
    seed: int = 0

    name: ClassVar[str] = "schedule"
    ignores_mode: ClassVar[bool] = True
    ignores_graph: ClassVar[bool] = True
    needs: ClassVar[tuple[type, ...]] = (Costs, Machine, Workload, Plan)
    learns: ClassVar[tuple[type, ...]] = (Workload, Plan)

    def __post_init__(self) -> None:
        for name in ("memory", "seconds"):
            if not getattr(self, name) >= 0:
                raise ChainError(f"schedule{{{name}={show(getattr(self, name))}}}: give a number of at least 0")

    def __call__(self, ir: IR) -> IR:
        """Learn the Plan with the schedule. A plan that states its schedule already keeps it.

        Raises ScheduleError for a plan with replicas, for a plan of inference, and for less memory than one microbatch
        needs.
        """
        plan, machine = ir[Plan], ir[Machine]
        if ir[Workload].inference:
            raise ScheduleError("the pass schedule: inference has no backwards to put in order, so leave it out")
        if plan.schedule_csv:
            stated = parse_csv(plan.schedule_csv, plan.schedule)
            planned, workload = take_schedule(plan, stated, ir[Costs], machine, ir[Workload])
            return ir.learn(workload, planned)
        limits = [min(machine.devices[d].memory_bytes for d in stage.devices) for stage in plan.stages]
        found = search_for_plan(
            plan, limits, memory=self.memory or None, time_limit_s=self.seconds or None, seed=self.seed
        )
        planned, workload = take_schedule(plan, found.schedule, ir[Costs], machine, ir[Workload])
        figures = {"step_ms": round(found.step_ms, 6), "bound_ms": round(found.bound_ms, 6)}
        return ir.learn(workload, planned).note(**figures)
