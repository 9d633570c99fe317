"""Trials: plans for a changed machine, workload or model, to show the effect of a change.

All steps are of the same batch. A trial that comes after the time is over is left out, and the report says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from fxsplit.errors import FxsplitError, ScheduleError
from fxsplit.ir.facts.costs.costs import Costs, InputCost, NodeCost
from fxsplit.ir.facts.costs.text import sum_by_module
from fxsplit.ir.facts.given.machine import MAX_DEVICES, Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import price_split
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from fxsplit.report.page.story import NextBest, Trial
from fxsplit.schedule.choose_schedule import NAMES
from fxsplit.schedule.generators.catalogue import SCHEDULES, SEARCH, Scheduler
from fxsplit.schedule.of_plan import read_footprints, read_times, restore_schedule
from fxsplit.schedule.schedule_plan import schedule_plan
from fxsplit.schedule.simulation.memory import find_peak, trace_memory
from fxsplit.schedule.simulation.simulate import Simulation, simulate
from fxsplit.system.figures import format_count, format_share

N_LAYERS = 4
"""How many of the slowest modules are tried at twice their speed."""
_VALUES = ("output_bytes", "gradient_bytes", "kept_bytes", "kept_for_bytes", "unkept_bytes", "storage_bytes")
OF_ROWS = ("forward_ms", "backward_ms", "host_ms", "lent_bytes", *_VALUES)
"""The figures of a node that grow with the rows of a microbatch."""
WIDTHS = (0.5, 1.0, 2.0, 4.0)
"""The bandwidths of the grid, as multiples of the machine's."""


class OutOfPatience(Exception):
    """The time for trials is over."""


@dataclass(frozen=True)
class Trials:
    """Plans for changes of a plan's machine, workload and costs, until `end_s` on the clock of time.perf_counter().

    The plan must know its costs and its machine.
    """

    plan: Plan
    end_s: float

    @cached_property
    def costs(self) -> Costs:
        """The costs that the plan was made from."""
        assert self.plan.costs is not None
        return self.plan.costs

    @cached_property
    def machine(self) -> Machine:
        """The real devices that the plan was made for."""
        assert self.plan.machine is not None
        return self.plan.machine.rolled()

    @cached_property
    def stages_per_device(self) -> int:
        """The number of stages that the schedule puts on a device."""
        assert self.plan.machine is not None
        homes = self.plan.machine.homes
        return max(1, len(homes) // len(self.machine)) if homes else 1

    @cached_property
    def planner(self) -> Planner:
        """The planner of the plan's own costs, which enumerates states once."""
        return Planner(self.costs)

    @cached_property
    def options(self) -> Options:
        """The options that the plan shows: the cost model, recomputation, and whether devices are idle."""
        assert self.plan.machine is not None
        again = [stage.recompute for stage in self.plan.stages]
        by_step = self.plan.minimised == "step"
        return Options(
            objective=self.plan.minimised,
            use_all=not by_step
            and len({d for stage in self.plan.stages for d in stage.devices}) == len(self.plan.machine),
            optimizer_factor=self.plan.model.optimizer_factor,
            model=self.plan.model.name,
            traffic=self.plan.model.traffic,
            recompute="always" if all(again) else "auto" if any(again) else "never",
        )

    def make_plan(
        self,
        machine: Machine | None = None,
        n_microbatches: int | None = None,
        planner: Planner | None = None,
        options: Options | None = None,
    ) -> Plan:
        """Return the best plan with these changes. Raises OutOfPatience, and PlanError if there is no plan."""
        left = self.end_s - time.perf_counter()
        if left <= 0:
            raise OutOfPatience
        laid_out, workload = self._lay_out(machine, n_microbatches)
        limited = replace(options or self.options, time_limit=left)
        plan = (planner or self.planner).plan(laid_out, workload, limited)
        return schedule_plan(plan, (planner or self.planner).costs, laid_out, workload)[0]

    def _lay_out(self, machine: Machine | None = None, n_microbatches: int | None = None) -> tuple[Machine, Workload]:
        """Return the machine, with a device for each stage, and the workload under the plan's schedule."""
        where = self.machine if machine is None else machine
        # A schedule that is stated action by action is for these devices only: try the one that plans are made for.
        known = (*SCHEDULES, SEARCH) if self.plan.minimised == "step" else SCHEDULES
        name = self.plan.schedule if self.plan.schedule in known else "1F1B"
        each = self.stages_per_device if self.stages_per_device > 1 else None
        return Scheduler(name, len(where), each).lay_out(where, n_microbatches or self.plan.n_microbatches)

    def try_change(
        self,
        trial: Trial,
        machine: Machine | None = None,
        n_microbatches: int | None = None,
        planner: Planner | None = None,
        options: Options | None = None,
    ) -> Trial:
        """Return the trial with the figures of its plan, or why there is none. Raises OutOfPatience."""
        try:
            plan = self.make_plan(machine, n_microbatches, planner, options)
            schedule = restore_schedule(plan)
            simulation = simulate(schedule, read_times(plan, schedule))
        except FxsplitError as error:
            return replace(trial, note=str(error).partition("\n")[0])
        bottleneck = plan.bottleneck_ms
        return replace(trial, bottleneck_ms=bottleneck, step_ms=simulation.step_ms, bubble=simulation.bubble)

    # The trials

    def list_all(self) -> Iterator[Trial]:
        """Yield all trials, in the order of their worth to a reader. Raises OutOfPatience once the time is over."""
        yield self.try_change(Trial("what if", "nothing changed"))
        yield from self._try_machines()
        yield from self._try_microbatches()
        yield from self._try_layers()
        yield from self._try_schedules()
        yield from self._try_grid()

    def _try_machines(self) -> Iterator[Trial]:
        """Yield plans for a device more and less, and for links twice and half as fast."""
        more, fewer = (resize(self.machine, len(self.machine) + n) for n in (1, -1))
        if more is not None:
            yield self.try_change(Trial("what if", "one more device"), more)
        if fewer is not None:
            yield self.try_change(Trial("what if", "one device fewer"), fewer)
        if not has_limited_links(self.machine):
            return
        for factor, change in ((2.0, "twice the bandwidth"), (0.5, "half the bandwidth")):
            yield self.try_change(Trial("what if", change), widen(self.machine, factor))

    def _try_microbatches(self) -> Iterator[Trial]:
        """Yield plans for microbatches of half and of twice the rows, of the same batch."""
        count = self.plan.n_microbatches
        for factor, n, change in ((0.5, 2 * count, "half the microbatch"), (2.0, count // 2, "twice the microbatch")):
            if factor == 2.0 and (count % 2 or count < 2):
                continue
            note = f"{format_count(n, 'microbatch')}; counts times and bytes of a node as {factor:g} times as large"
            planner = Planner(scale_rows(self.costs, factor))
            yield self.try_change(Trial("what if", change, note=note), n_microbatches=n, planner=planner)
        if self.options.recompute == "never" and not self.costs.inference:
            options = replace(self.options, recompute="always")
            yield self.try_change(Trial("what if", "all stages recompute"), options=options)

    def _try_layers(self) -> Iterator[Trial]:
        """Yield plans for each of the slowest modules at twice its speed."""
        named = [node for node in self.costs.nodes if node.owner] or list(self.costs.nodes)
        for name, nodes in sum_by_module(named, N_LAYERS).items():
            faster = {node.name for node in nodes}
            share = sum(n.forward_ms + n.backward_ms for n in nodes) / (self.costs.compute_ms or 1.0)
            planner = Planner(speed_up(self.costs, faster, 2.0))
            note = f"{format_share(share)} of all computing, {format_count(len(nodes), 'node')}"
            note += "; * stands for every number" * ("*" in name)
            yield self.try_change(Trial("layer", name, note=note), planner=planner)

    def _try_schedules(self) -> Iterator[Trial]:
        """Yield the same stages under other schedules."""
        if self.stages_per_device > 1 or self.costs.inference or any(len(s.devices) > 1 for s in self.plan.stages):
            return
        for name in NAMES:
            if name == self.plan.schedule:
                continue
            try:
                simulation = self._simulate_under(name)
            except ScheduleError:
                continue
            note = "" if self._fits(simulation) else "needs more memory than there is"
            yield Trial(
                "what if", f"schedule {name}", self.plan.bottleneck_ms, simulation.step_ms, simulation.bubble, note
            )

    def _simulate_under(self, name: str) -> Simulation:
        """Return the step of the plan's stages under another schedule."""
        schedule = Scheduler(name, len(self.plan.stages)).schedule(self.plan.n_microbatches)
        return simulate(schedule, read_times(self.plan, schedule))

    def _fits(self, simulation: Simulation) -> bool:
        """Return whether a simulated step fits in the memory of each device."""
        assert self.plan.machine is not None
        traces = trace_memory(simulation, read_footprints(self.plan))
        limits = [stage.find_limit(self.plan.machine) for stage in self.plan.stages]
        return all(find_peak(trace) <= limit for trace, limit in zip(traces, limits, strict=True))

    def _try_grid(self) -> Iterator[Trial]:
        """Yield plans for several numbers of devices, and several bandwidths if links have one."""
        here = len(self.machine)
        counts = sorted({max(1, here // 2), max(1, here - 1), here, here + 1, 2 * here})
        widths = WIDTHS if has_limited_links(self.machine) else (1.0,)
        for count in counts:
            for width in widths:
                resized = resize(self.machine, count)
                if resized is None:
                    continue
                other = widen(resized, width)
                row = format_count(count, "device")
                column = "links as they are" if width == 1.0 else f"{width:g} x bandwidth"
                yield self.try_change(Trial("grid", f"{row}, {column}", place=(row, column)), other)

    def find_next_best(self) -> Iterator[NextBest]:
        """Yield what other places for each cut bring, in order. Raises OutOfPatience once the time is over.

        Yields nothing for a plan with the shortest step, whose stages are not judged by the slowest one.
        """
        if self.plan.minimised == "step":
            return
        before: set[str] = set()
        for number, stage in enumerate(self.plan.stages[:-1], 1):
            before |= set(stage.nodes)
            never = replace(self.planner, never=(frozenset(before),))
            earlier, later = self.shift_cut(number, later=False), self.shift_cut(number, later=True)
            found = NextBest(number, None, earlier_ms=earlier, later_ms=later)
            with suppress(FxsplitError):
                plan = self.make_plan(planner=never)
                found = replace(found, bottleneck_ms=plan.bottleneck_ms, lower_bound_ms=plan.lower_bound_ms)
            yield found

    def shift_cut(self, number: int, *, later: bool) -> float | None:
        """Return the load of the slowest stage in ms with the cut before stage `number` one operation later or earlier.

        Nodes without time move with the operation. None if a stage would then compute nothing.
        """
        parts = [list(stage.nodes) for stage in self.plan.stages]
        # In the order of the graph, a stage can end after any of its nodes.
        joined, nodes = parts[number - 1] + parts[number], self.costs.by_name
        timed = [i for i, name in enumerate(joined) if nodes[name].forward_ms + nodes[name].backward_ms > 0]
        first = sum(i < len(parts[number - 1]) for i in timed)  # of the stage after the cut
        kept = first + 1 if later else first - 1
        if not 0 < kept < len(timed):
            return None
        end = timed[kept - 1] + 1 if later else timed[kept]
        parts[number - 1], parts[number] = joined[:end], joined[end:]
        split = [(names, s.devices, s.recompute) for names, s in zip(parts, self.plan.stages, strict=True)]
        return max(stage.load_ms for stage in price_split(self.costs, *self._lay_out(), split, self.plan.model))


def has_limited_links(machine: Machine) -> bool:
    """Return whether some transfer on a machine takes time that depends on its bytes."""
    return min(machine.links, default=inf) < inf or any(d.bytes_per_s < inf for d in machine.devices)


def resize(machine: Machine, count: int) -> Machine | None:
    """Return a machine with more devices like its last one, or without its last ones; None if that is no machine."""
    if not 1 <= count <= MAX_DEVICES:
        return None
    devices, links = list(machine.devices[:count]), list(machine.links[: count - 1])
    late = list(machine.latencies_ms[: count - 1])
    last, link = machine.devices[-1], machine.links[-1] if machine.links else inf
    for number in range(len(devices), count):
        name = f"another{number}"
        devices.append(replace(last, name=name))
        links.append(link)
        late += [machine.latencies_ms[-1]] if machine.latencies_ms else []
    return replace(machine, devices=tuple(devices), links=tuple(links), latencies_ms=tuple(late))


def widen(machine: Machine, factor: float) -> Machine:
    """Return a machine whose links have `factor` times the bandwidth."""
    devices = tuple(replace(d, bytes_per_s=d.bytes_per_s * factor) for d in machine.devices)
    return replace(machine, devices=devices, links=tuple(link * factor for link in machine.links))


def scale_rows(costs: Costs, factor: float) -> Costs:
    """Return the costs of microbatches of `factor` times the rows, if times and bytes of values grow with the rows.

    Small operators gain less from fewer rows, so this favours small microbatches. Weights stay as they are.
    """

    def scale(node: NodeCost) -> NodeCost:
        changed = {name: getattr(node, name) * factor for name in OF_ROWS}
        weight = None if node.weight_ms is None else node.weight_ms * factor
        return replace(node, weight_ms=weight, **changed)

    inputs: tuple[InputCost, ...] = tuple(
        replace(i, output_bytes=i.output_bytes * factor, gradient_bytes=i.gradient_bytes * factor) for i in costs.inputs
    )
    return replace(costs, nodes=tuple(map(scale, costs.nodes)), inputs=inputs)


def speed_up(costs: Costs, names: set[str], factor: float) -> Costs:
    """Return the costs with some nodes `factor` times as fast."""

    def scale(node: NodeCost) -> NodeCost:
        weight = None if node.weight_ms is None else node.weight_ms / factor
        return replace(
            node, forward_ms=node.forward_ms / factor, backward_ms=node.backward_ms / factor, weight_ms=weight
        )

    return replace(costs, nodes=tuple(scale(n) if n.name in names else n for n in costs.nodes))
