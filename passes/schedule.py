"""schedule: put the work of the plan's stages in the order that their times ask for; learns Workload and Plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxsplit.errors import ChainError, ScheduleError
from fxsplit.ir.chain import pass_text
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.graph import IR
from fxsplit.schedule.generators.catalogue import SEARCH
from fxsplit.schedule.search_plan import schedule_plan
from fxsplit.system.figures import show


@dataclass(frozen=True)
class SchedulePlan:
    """Order the work of a plan's stages by their times, within the memory of their devices: `partition,schedule,emit`.

    Under the schedule "search" it searches for the fastest order, with these options:

    - `memory`: how many microbatches a device may hold at most; 0 for as many as its memory has room for
    - `seconds`: the time limit of the search; 0 for 2 s up to 4,000 actions, and 10 s above
    - `seed`: another seed may find another schedule

    Under a schedule that depends on times, such as ZBVZeroBubble, it generates it from those of the plan. Under the
    others it changes nothing. The workload says which schedule it is: `compile(schedule="search")`.
    """

    memory: float = 0.0
    seconds: float = 0.0
    seed: int = 0

    name: ClassVar[str] = "schedule"
    ignores_mode: ClassVar[bool] = True
    ignores_graph: ClassVar[bool] = True
    needs: ClassVar[tuple[type, ...]] = (Costs, Machine, Workload, Plan)

    def __post_init__(self) -> None:
        for name in ("memory", "seconds"):
            if not getattr(self, name) >= 0:
                raise ChainError(f"schedule{{{name}={show(getattr(self, name))}}}: give a number of at least 0")

    def __call__(self, ir: IR) -> IR:
        """Learn the Plan and the Workload with the schedule. A plan that states its schedule already keeps it.

        Raises ScheduleError for a plan of inference, for options of a search if there is none, and under "search" for a
        plan with replicas and for less memory than one microbatch needs.
        """
        name = ir[Workload].schedule
        if ir[Workload].inference:
            raise ScheduleError("the pass schedule: inference has no backwards to put in order, so leave it out")
        if self != SchedulePlan() and name != SEARCH:
            raise ScheduleError(
                f"{pass_text(self)}: its options are for schedule='search', and this one is {name!r}: give that, or "
                "leave the options out"
            )
        if self != SchedulePlan() and ir[Plan].schedule_csv:
            raise ScheduleError(f"{pass_text(self)}: the plan states its schedule already, so leave the options out")
        plan, workload, found = schedule_plan(
            ir[Plan],
            ir[Costs],
            ir[Machine],
            ir[Workload],
            memory=self.memory or None,
            time_limit_s=self.seconds or None,
            seed=self.seed,
        )
        if workload is ir[Workload]:
            return ir
        learnt = ir.learn(workload, plan)
        if found is None:
            return learnt
        return learnt.note(step_ms=round(found.step_ms, 6), bound_ms=round(found.bound_ms, 6))
