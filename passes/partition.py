"""partition: cut the state sequence into the stages of the fastest plan; learns Plan.

An *ideal* is a set of nodes that contains every node they read. `augment` has found the ideals (Antichains), and
`order` has put them in sequence as *states*, with sums of times and bytes (States). A stage lies between two states.
This is the last pass of planning: `emit` then builds a module for each stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fxsplit.errors import TooFewParts
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.pins import Pins
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.graph import IR
from fxsplit.planner.clock import SearchClock
from fxsplit.planner.lattice.lattice import enumerate_ideals
from fxsplit.planner.lattice.sequence import sequence_states
from fxsplit.planner.planner import plan_stages
from fxsplit.planner.solve import Options, Task
from fxsplit.schedule.schedule_plan import schedule_plan
from fxsplit.system.user_lines import warn_user


@dataclass(frozen=True)
class Partition(Options):
    """Find the plan with the smallest load of the slowest stage, or with `objective="step"` with the shortest step.

    The search is dynamic programming over the states, within the memory of every device.
    """

    name: ClassVar[str] = "partition"
    ignores_mode: ClassVar[bool] = True
    needs: ClassVar[tuple[type, ...]] = (Costs, Machine, Workload, Antichains, States)
    learns: ClassVar[tuple[type, ...]] = (Plan,)
    ignores_graph: ClassVar[bool] = True

    def __call__(self, ir: IR) -> IR:
        """Learn Plan from States, and the Workload of a plan that states the order of its work.

        If that plan has two stages on each device, learn its Machine too: it has a device for each stage.

        Raises PlanError if no plan fits, with the stage that lacks memory and by how much.

        If the graph cannot be cut into enough stages, some stages have no nodes and only pass values on.
        """
        costs, pins = ir[Costs], ir.get(Pins)
        pinned = pins.nodes(costs, ir[Machine]) if pins else {}
        task = Task(costs, ir[Machine], ir[Workload], self, pinned)
        chains = ir[Antichains]

        # `augment` joined nodes that need no stage of their own, before this pass's options were known.
        def enumerate_again(whole: bool) -> tuple[Antichains, States]:
            rate = task.reduce_ms_per_byte
            found = enumerate_ideals(costs, task.machine, pinned, chains.max_states, join=not whole, ms_per_byte=rate)
            return found, sequence_states(costs, found)

        # The time limit covers only this pass, not the enumeration of ideals before it.
        clock = SearchClock.limited(self.time_limit)

        def learn_plan(task: Task) -> IR:
            plan, facts = plan_stages(task, chains, ir[States], enumerate_again, clock), list[Workload | Machine]()
            if plan.schedule_csv:  # a plan with the shortest step states the order of its work
                plan, workload, _ = schedule_plan(plan, costs, task.machine, task.workload)
                if plan.machine is not None and plan.machine.homes:  # its devices have two stages each
                    facts.append(plan.machine)
                # In a text the workload stands after the machine, since what stages hold follows from both.
                facts.append(workload)
            figures = {"stages": len(plan.stages), "states": plan.n_states, "proof": plan.proof or "none"}
            return ir.learn(*facts, plan).note(**figures, tests=clock.work.tests, steps=clock.work.steps)

        try:
            return learn_plan(task)
        except TooFewParts as error:
            warn_user(f"some stages only pass values on, since the model takes fewer: {error}")
        return learn_plan(replace(task, workload=replace(task.workload, may_idle=True)))
