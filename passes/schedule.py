"""schedule: choose or search the order in which devices work, from the times of a plan; learns Workload and Plan."""

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
from fxsplit.schedule.choose_schedule import choose_schedule
from fxsplit.schedule.generators.catalogue import SEARCH
from fxsplit.schedule.schedule_plan import schedule_plan
from fxsplit.system.figures import show

PLANNED = "1F1B"
"""The schedule that plans are made for if the schedule is chosen afterwards."""
LEAST_S, SHARE = 0.05, 0.05
"""The time for a choice: so many seconds, or this share of the time of the passes before if that is more."""


@dataclass(frozen=True)
class SchedulePlan:
    """Order the work of a plan's stages by their times, within the memory of their devices: `partition,schedule,emit`.

    Under the schedule "search" it searches for the fastest order, with these options:

    - `memory`: how many microbatches a device may hold at most; 0 for as many as its memory has room for
    - `seconds`: the time limit of the search; 0 for 2 s up to 4,000 actions, and 10 s above
    - `seed`: another seed may find another schedule

    Under a schedule that depends on times, such as ZBVZeroBubble, it generates the schedule from the times of the plan.
    Under the others it changes nothing. The workload names the schedule, as in `compile(schedule="search")`.

    For a plan that is made for 1F1B, `schedule{choose=true}` chooses, among 1F1B, GPipe, ZB-H1, ZB-H2 and a searched
    schedule, the one with the shortest simulated step that fits in memory, as `compile(schedule=None)` does. Choosing
    takes 50 ms, or 5 % of the time of the passes before if that is more. The search gets the part of this time that
    simulating the others leaves. With `splits=false` only 1F1B and GPipe are compared: they do not split backwards,
    and stages that torch.compile has compiled cannot.
    """

    memory: float = 0.0
    seconds: float = 0.0
    seed: int = 0
    choose: bool = False
    splits: bool = True

    name: ClassVar[str] = "schedule"
    ignores_mode: ClassVar[bool] = True
    ignores_graph: ClassVar[bool] = True
    needs: ClassVar[tuple[type, ...]] = (Machine, Workload, Plan)

    def __post_init__(self) -> None:
        for name in ("memory", "seconds"):
            if not getattr(self, name) >= 0:
                raise ChainError(f"schedule{{{name}={show(getattr(self, name))}}}: give a number of at least 0")
        if self.choose and (self.memory, self.seconds, self.seed) != (0, 0, 0):
            raise ChainError(
                f"{pass_text(self)}: memory, seconds and seed are for schedule='search', so leave them or choose out"
            )
        if not (self.splits or self.choose):
            raise ChainError(f"{pass_text(self)}: splits is for choose=true, so give that, or leave it out")

    def __call__(self, ir: IR) -> IR:
        """Learn the Plan and the Workload with the schedule. A plan that states its schedule already keeps it.

        Nothing is chosen if a pass has rewritten the graph after the plan was made, since Costs is forgotten then.

        Raises ScheduleError for a plan of inference, and for options of a search under another schedule. Under "search"
        it is also raised for a plan with replicas, and for less memory than one microbatch needs.
        """
        if ir[Workload].inference:
            raise ScheduleError("the pass schedule: inference has no backwards to put in order, so leave it out")
        limit_s = self.seconds
        if self.choose:
            limit_s = max(LEAST_S, SHARE * sum(step.seconds for step in ir.steps))
            if ir.get(Costs) is None:
                return ir
            if ir[Workload].schedule == PLANNED:
                return self._choose(ir, limit_s)
        else:
            self._check_options(ir)
        plan, workload, found = schedule_plan(
            ir[Plan],
            ir[Costs],
            ir[Machine],
            ir[Workload],
            memory=self.memory or None,
            time_limit_s=limit_s or None,
            seed=self.seed,
        )
        if workload is ir[Workload]:
            return ir
        learnt = ir.learn(workload, plan)
        if found is None:
            return learnt
        return learnt.note(step_ms=round(found.step_ms, 6), bound_ms=round(found.bound_ms, 6))

    def _check_options(self, ir: IR) -> None:
        """Raise ScheduleError for options of a search if nothing is searched."""
        name = ir[Workload].schedule
        if self != SchedulePlan() and name != SEARCH:
            raise ScheduleError(
                f"{pass_text(self)}: its options are for schedule='search', and this one is {name!r}: give that, or "
                "leave the options out"
            )
        if self != SchedulePlan() and ir[Plan].schedule_csv:
            raise ScheduleError(f"{pass_text(self)}: the plan states its schedule already, so leave the options out")

    def _choose(self, ir: IR, limit_s: float) -> IR:
        """Learn the Plan and the Workload with the fastest schedule that fits."""
        facts = ir[Plan], ir[Costs], ir[Machine], ir[Workload]
        plan, workload = choose_schedule(*facts, limit_s=limit_s, splits=self.splits)
        return ir if plan is ir[Plan] else ir.learn(workload, plan)
