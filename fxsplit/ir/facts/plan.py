"""Plan: the nodes of each stage, their predicted costs, and how far the plan may be from the best.

The pass `partition` makes this fact, and `fxsplit.plan` returns it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf, isclose, isfinite
from typing import ClassVar, Literal

from fxsplit.errors import BrokenFact, FxsplitError, PlanError
from fxsplit.ir.facts.compared import ComparedCount, ComparedSchedule
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.costs.estimated import Estimated
from fxsplit.ir.facts.given.machine import TRANSFER_KINDS, Machine, TransferKind
from fxsplit.ir.facts.given.pins import Pins
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.price import (
    COST_MODELS,
    FIGURES,
    CostModel,
    StagePlan,
    find_busiest_ms,
    price_single_device,
    price_split,
)
from fxsplit.ir.facts.split import Split, find_split
from fxsplit.ir.graph import IR, Fact
from fxsplit.ir.text.records import Record, Row, list_values, order_columns, write_record
from fxsplit.system.figures import format_bytes, format_count, show
from fxsplit.system.imports import import_above
from fxsplit.system.shown import Parts, Shown, Table

Proof = Literal["search", "bound"]
PROVEN = 1e-6
"""A plan whose gap is below this is called optimal. The search compares loads with a slack of 1e-9."""


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Shown, Fact):
    """Stages in pipeline order, and the proof of their quality.

    - `lower_bound_ms` is a lower bound on the load of the slowest stage of any plan
    - `single_ms` is the time of one microbatch on the fastest device of the machine
    - `n_states` is the number of searched states, `rows` the size of a microbatch, `model` the cost model
    - `spread` is the relative spread of the measured times (see Costs), and so of all predicted times
    - `measured_on` is the accelerator of the measurement, empty for a CPU or an unknown one
    - `estimated` says what the times were estimated for; None if they were measured
    - `shared_ms` is the work of one microbatch on the busiest accelerator that several devices share, zero if no
      devices share one. Loads assume that devices share nothing
    - `busiest_ms` is the time in which a microbatch keeps the busiest device busy, with all of its stages together;
      zero in plans of earlier versions
    - `compress` is the compression of values that cross cuts: empty, `bf16` or `int8`
    - `fixed_rows` are the sizes of microbatches that the graph is for, if forward() makes its number of rows a
      constant; empty for a graph that takes other sizes as well
    - `transfers` says whether the machine's devices compute while their messages are under way, or wait for them
    - `schedule_csv`: the actions of the schedule, as a file in torch's format, if its name and numbers do not give them
    - `compared`: the schedules from which this one was chosen, the one with the shortest step first; empty if the
      schedule was given
    - `compared_counts`: the numbers of microbatches from which the plan's was chosen; empty if it was given
    - the plan was priced for `costs` and `machine`, which pictures and reports show; None in a plan from a file
    - `step_ms` is the time of one step under the plan's schedule, as simulated; None if nobody has simulated it
    - `step_lower_bound_ms` is a lower bound on the step of any plan, if the step was minimised and not the bottleneck
    - `proof` says how the lower bound is known: "search" if all plans were searched, "bound" if the bound may be out of
      reach, None if it is not proven. Only the planner fills it in: a plan that a pass makes or changes is not proven,
      whatever bound it states
    """

    stages: tuple[StagePlan, ...]
    device_names: tuple[str, ...]
    lower_bound_ms: float
    single_ms: float
    schedule: str
    n_microbatches: int
    rows: int
    n_states: int
    model: CostModel = field(default_factory=CostModel)
    spread: float | None = None
    measured_on: str = ""
    shared_ms: float = 0.0
    compress: str = ""
    busiest_ms: float = 0.0
    fixed_rows: tuple[int, ...] = ()
    transfers: TransferKind = "asynchronous"
    schedule_csv: str = ""
    compared: tuple[ComparedSchedule, ...] = ()
    compared_counts: tuple[ComparedCount, ...] = ()
    costs: Costs | None = None
    machine: Machine | None = None
    step_ms: float | None = None
    step_lower_bound_ms: float | None = None
    estimated: Estimated | None = None
    proof: Proof | None = field(default=None, init=False)

    derives_from: ClassVar[tuple[type, ...]] = (Costs, Machine, Workload, Pins)
    made_by: ClassVar[str] = "partition"

    @classmethod
    def of(
        cls,
        ir: IR,
        split: Split,
        *,
        model: CostModel | None = None,
        recompute: Collection[int] | None = None,
    ) -> Plan:
        """Return the plan of a split by hand, priced by the Costs, the Machine and the Workload of `ir`.

        split: the stage of each submodule or node by its name, a list of names for each stage, or `cut_before(...)`. A
            node that nobody names is in the stage of the latest of its inputs. Stage i runs on device i.
        model: the cost model, by default the one of `partition`.
        recompute: the stages that keep no activations (default: all or none, as the Workload says, or else none).

        The plan is not proven. Raises PlanError for names that the graph lacks, and for a split that cannot run.
        """
        costs, machine, model = ir[Costs], ir[Machine], model or CostModel()
        parts = find_split(costs, split, len(machine))
        if recompute is None:
            recompute = range(len(parts)) if ir[Workload].recompute == "always" else ()
        if not isinstance(recompute, Collection):
            raise PlanError(f"recompute={show(recompute)}: give the numbers of stages, such as [0]")
        odd = next((stage for stage in recompute if stage not in range(len(parts))), None)
        if odd is not None:
            raise PlanError(f"recompute has {odd!r}, and the split has stages 0 to {len(parts) - 1}")
        chosen = [(names, (i,), i in recompute) for i, names in enumerate(parts)]
        priced = tuple(price_split(costs, machine, ir[Workload], chosen, model))
        plan = cls.assemble(priced, costs, machine, ir[Workload], model, lower_bound_ms=0.0, n_states=0)
        try:
            plan.verify(ir)
        except BrokenFact as error:
            raise PlanError(f"this split cannot run: {error}") from error
        return plan

    @classmethod
    def assemble(
        cls,
        stages: tuple[StagePlan, ...],
        costs: Costs,
        machine: Machine,
        workload: Workload,
        model: CostModel,
        *,
        lower_bound_ms: float,
        n_states: int,
    ) -> Plan:
        """Return the plan of priced stages."""
        names, single_ms = tuple(d.name for d in machine.devices), price_single_device(costs, machine)
        schedule, count = workload.schedule, workload.n_microbatches
        rows, spread, hardware = costs.rows, costs.spread, costs.hardware
        shared_ms = _find_shared_ms(stages, machine)
        return cls(
            stages,
            names,
            lower_bound_ms,
            single_ms,
            schedule,
            count,
            rows,
            n_states,
            model,
            spread,
            hardware,
            shared_ms,
            costs.compress,
            find_busiest_ms(stages, machine, model),
            costs.fixed_rows,
            machine.transfers,
            workload.schedule_csv,
            costs=costs,
            machine=machine,
            estimated=costs.estimated,
        )

    def prove(self, proof: Proof | None) -> Plan:
        """Record how the lower bound was proven, and return the plan; for the planner and for plans from files."""
        # Not an argument of the constructor, so that dataclasses.replace() gives a plan that is not proven.
        object.__setattr__(self, "proof", proof)
        return self

    def attach(self, costs: Costs, machine: Machine | None = None) -> Plan:
        """Return the plan with the costs that it was made from, and the machine, to show and explain it.

        Raises PlanError for costs of other nodes than those of its stages.
        """
        # Plans from PipeDream's files have the inputs of the model in the first stage.
        given = {i.name for i in costs.inputs}
        stages = tuple(replace(s, nodes=tuple(n for n in s.nodes if n not in given)) for s in self.stages)
        odd = sorted(set(costs.by_name) ^ {name for stage in stages for name in stage.nodes})
        if odd:
            raise PlanError(
                f"the profile is of another graph than the plan: only one of them has node {odd[0]!r}; give the "
                "profile that the plan was made from"
            )
        found = replace(self, stages=stages, costs=costs, machine=machine or self.machine)
        return found.prove(self.proof)

    @property
    def bottleneck_ms(self) -> float:
        """The load of the slowest stage."""
        return max(s.load_ms for s in self.stages)

    @property
    def steady_ms(self) -> float:
        """The time of the pipeline for each microbatch in steady state: that of the busiest device."""
        return max(self.bottleneck_ms, self.busiest_ms, self.shared_ms)

    @property
    def speedup(self) -> float:
        """The speed of the pipeline in steady state, relative to the fastest single device."""
        return self.single_ms / self.steady_ms if self.steady_ms else inf

    @property
    def single_step_ms(self) -> float:
        """The time of the batch on one device, with the best of the compared numbers of microbatches, in ms."""
        return min((count.single_ms for count in self.compared_counts), default=self.n_microbatches * self.single_ms)

    @property
    def step_speedup(self) -> float | None:
        """The speed of a step, relative to one device that runs the same batch; None if the step is unknown."""
        return self.single_step_ms / self.step_ms if self.step_ms else None

    @property
    def gap(self) -> float:
        """The relative distance of the bottleneck above the lower bound; infinite if the bound is zero."""
        if self.lower_bound_ms > 0:
            return self.bottleneck_ms / self.lower_bound_ms - 1.0
        return inf if self.bottleneck_ms > 0 else 0.0

    @property
    def minimised(self) -> Literal["bottleneck", "step"]:
        """The figure that the planner has made as small as it could."""
        return "bottleneck" if self.step_lower_bound_ms is None else "step"

    @property
    def step_gap(self) -> float | None:
        """The relative distance of the step above its lower bound; None if the step was not minimised."""
        if self.step_ms is None or self.step_lower_bound_ms is None:
            return None
        if self.step_lower_bound_ms > 0:
            return self.step_ms / self.step_lower_bound_ms - 1.0
        return inf if self.step_ms > 0 else 0.0

    @property
    def interpolated_between(self) -> tuple[int, ...]:
        """The rows of the two profiles from which the plan's costs are interpolated; empty for measured costs."""
        return next((c.between for c in self.compared_counts if c.n_microbatches == self.n_microbatches), ())

    @property
    def _proven_gap(self) -> float:
        """The gap of the figure that was minimised."""
        return self.gap if self.step_gap is None else self.step_gap

    @property
    def optimal(self) -> bool:
        """Whether the plan is proven to be the best: no other has a smaller bottleneck, or a shorter step."""
        return self.proof is not None and self._proven_gap < PROVEN

    @property
    def standing(self) -> str:
        """The proof in words: "optimal", "optimal for estimated times", "gap 3.10 %", or "not proven"."""
        if self.optimal:
            return "optimal for estimated times" if self.estimated else "optimal"
        known = self.proof is not None and isfinite(self._proven_gap)
        return f"gap {100 * self._proven_gap:.2f} %" if known else "not proven"

    @property
    def reliability(self) -> str:
        """How far predicted times may be off, for people, to follow a time; empty if it is unknown."""
        return format_spread(self.spread) + (f", {self.estimated}" if self.estimated else "")

    def stage_of(self) -> dict[str, int]:
        """Return the stage of every node."""
        return {name: i for i, s in enumerate(self.stages) for name in s.nodes}

    def verify(self, ir: IR) -> None:
        """Raise BrokenFact unless the stages partition the nodes, run forwards and cost what the plan says.

        The cost is computed again from the definition, on the graph and not on the lattice that was searched.
        """
        costs = ir.get(Costs)
        if ir.get(Machine) is not None:
            self._verify_devices(len(ir[Machine]))
        # `emit` rewrites the graph into stages and forgets the costs; the plan describes the graph before.
        if costs is None:
            return
        machine = ir[Machine]
        stage_of = self.stage_of()
        if set(stage_of) != set(costs.by_name) or len(stage_of) != sum(len(s.nodes) for s in self.stages):
            raise BrokenFact("the stages of the plan do not partition the nodes")
        for node in costs.nodes:
            for name in node.inputs:
                if stage_of.get(name, -1) > stage_of[node.name]:
                    raise BrokenFact(f"node {node.name!r} reads {name!r} from a later stage")
        # Nodes may depend on each other without a value: one writes memory that the other reads.
        for a, b in costs.ordered:
            if stage_of[a] > stage_of[b]:
                raise BrokenFact(f"node {a!r} must run before {b!r}, and its stage is later")
        parted = next((names for names in costs.together if len({stage_of[n] for n in names}) > 1), None)
        if parted is not None:
            raise BrokenFact(
                f"nodes {', '.join(parted)} must stay together, as they share memory or a weight, and lie in several "
                "stages"
            )
        # Price again from the graph: the sums of the search over its lattice are not trusted.
        split = [(s.nodes, s.devices, s.recompute) for s in self.stages]
        priced = price_split(costs, machine, ir[Workload], split, self.model)
        for number, (mine, other) in enumerate(zip(self.stages, priced, strict=True)):
            for figure in FIGURES:
                said, true = getattr(mine, figure), getattr(other, figure)
                if not isclose(said, true, rel_tol=1e-9, abs_tol=1e-12):
                    raise BrokenFact(f"stage {number} is said to have {figure}={said} and has {true}")
            # Replicas need the same memory, so the smallest of their devices decides.
            if other.memory_bytes > mine.find_limit(machine):
                raise BrokenFact(f"stage {number} needs {other.memory_bytes:.0f} bytes, more than its device has")
        self._verify_speedup(costs, machine)
        pins = ir.get(Pins)
        for name, stage in (pins.nodes(costs) if pins else {}).items():
            if stage not in self.stages[stage_of[name]].devices:
                where = f"pinned to stage {stage} and planned on {stage_of[name]}"
                raise BrokenFact(f"node {name!r} is {where}: pin before 'partition'")
        # A bound above the plan would call every plan optimal.
        if self.lower_bound_ms > self.bottleneck_ms * (1 + 1e-9):
            raise BrokenFact(f"lower bound {self.lower_bound_ms} ms above the bottleneck {self.bottleneck_ms} ms")

    def _verify_speedup(self, costs: Costs, machine: Machine) -> None:
        """Raise BrokenFact unless the two figures that give the speed-up agree with costs and stages."""
        figures = {
            "single_ms": price_single_device(costs, machine),
            "busiest_ms": find_busiest_ms(self.stages, machine, self.model),
        }
        for figure, true in figures.items():
            said = getattr(self, figure)
            # A plan of an earlier version does not say how busy its devices are.
            if said and not isclose(said, true, rel_tol=1e-9, abs_tol=1e-12):
                raise BrokenFact(f"the plan is said to have {figure}={said} and has {true}: make it by Plan.assemble")

    def _verify_devices(self, count: int) -> None:
        """Raise BrokenFact unless every stage has devices of its own, among the `count` existing ones."""
        if not self.stages:
            raise BrokenFact("the plan has no stages")
        taken: set[int] = set()
        for number, stage in enumerate(self.stages):
            odd = next((d for d in stage.devices if d not in range(count) or d in taken), None)
            if odd is not None or not stage.devices:
                raise BrokenFact(
                    f"stage {number} is on devices {list(stage.devices)}: give numbers from 0 to {count - 1}, each to "
                    "one stage"
                )
            taken |= set(stage.devices)

    def _describe_sent(self) -> str:
        """Return the bytes that cross all cuts for a microbatch, values and gradients, compressed and uncompressed."""
        behind = self.stages[1:]
        sent = sum(s.in_sent_bytes + s.in_sent_gradient_bytes for s in behind)
        own = sum(s.in_bytes + s.in_gradient_bytes for s in behind)
        return f"{format_bytes(sent)} for a microbatch in place of {format_bytes(own)}"

    def to_record(self, ir: IR) -> Record:
        """Return the plan as it is stored in text.

        If the costs are there to price them, only devices, recompute and nodes of its stages are stored. Comments say
        what follows from that: the figures of each stage, the values that cross each cut, and the bottleneck.
        """
        model = {"model": self.model.name, **{k: v for k, v in list_values(self.model).items() if k != "name"}}
        values: Row = {**model, "lower_bound_ms": self.lower_bound_ms, "n_states": self.n_states, "proof": self.proof}
        if all(ir.get(kind) is not None for kind in (Costs, Machine, Workload)):
            stages = [{"devices": s.devices, "recompute": s.recompute, "nodes": s.nodes} for s in self.stages]
            known = {"step_ms": self.step_ms, "step_lower_bound_ms": self.step_lower_bound_ms}
            values |= {name: value for name, value in known.items() if value is not None}
            values |= {"bound_for": _take_digest(ir)}
        else:
            values |= list_values(
                self, leave_out=("stages", "compared", "compared_counts", "costs", "machine", *values)
            )
            stages = order_columns(StagePlan, self.stages)
            values |= {"estimated": [list_values(self.estimated)]} if self.estimated else {}
        if self.compared:
            values |= {"compared": order_columns(ComparedSchedule, self.compared)}
        if self.compared_counts:
            values |= {"compared_counts": order_columns(ComparedCount, self.compared_counts)}
        return Record("Plan", {**values, "stages": stages}, [*str(self).splitlines(), *self._describe_cuts(ir)])

    def _describe_cuts(self, ir: IR) -> list[str]:
        """Return a line for each stage, with its memory and limit, and one for each cut, with the values that cross."""
        machine, costs = ir.get(Machine), ir.get(Costs)
        traffic = "" if self.model.traffic else ", transfers unpriced"
        state = f"{self.model.optimizer_factor:g} B of optimizer state for each of parameters"
        lines = [f"cost model {self.model.name}{traffic}, {state}"]
        inside: set[str] = set()
        for number, stage in enumerate(self.stages):
            least = inf if machine is None else stage.find_limit(machine)
            limit = "" if machine is None else f" of {'unlimited' if least == inf else format_bytes(least)}"
            memory = f"{format_bytes(stage.memory_bytes)}{limit}{', recomputes' * stage.recompute}"
            parts = [f"{kind} {format_bytes(size)}" for kind, size in stage.memory_kinds.items() if size]
            of = f": {', '.join(parts)}" if parts else ""
            lines.append(f"stage {number}: load {stage.load_ms:.3f} ms, memory {memory}{of}")
            inside |= set(stage.nodes)
            if costs is not None and number + 1 < len(self.stages):
                lines.append(f"cut {number}|{number + 1}: {', '.join(_list_crossing(costs, inside)) or 'nothing'}")
        return lines

    @classmethod
    def from_record(cls, record: Record, ir: IR) -> Plan:
        """Return the plan of a record; raises IRSyntaxError.

        The costs before it price its stages, if the record has no figures.
        """
        values, rows = dict(record.values), record.take_rows("stages")
        values["compared"] = record.read_rows(ComparedSchedule, "compared")
        values["compared_counts"] = record.read_rows(ComparedCount, "compared_counts")
        estimated = record.read_rows(Estimated, "estimated")
        values |= {"estimated": estimated[0]} if estimated else {}
        if not rows:
            record.fail("there are no stages: give a table with devices and nodes", "stages")
        values.pop("stages")
        given = {f.name: values.pop(f.name) for f in fields(CostModel) if f.name in values}
        model = record.make_row(CostModel, given | {"name": values.pop("model", CostModel.name)}, "model")
        record.choose("model", model.name, COST_MODELS)
        record.choose("transfers", values.get("transfers", cls.transfers), TRANSFER_KINDS)
        proof = record.choose("proof", values.pop("proof", None), ("search", "bound", None))
        costs, machine, workload = ir.get(Costs), ir.get(Machine), ir.get(Workload)
        if "load_ms" in rows[0] or costs is None or machine is None or workload is None:
            stages = tuple(record.make_row(StagePlan, row, "stages") for row in rows)
            return record.make_row(cls, values | {"stages": stages, "model": model}, "").prove(proof)
        record.check_row(cls, {name: value for name, value in values.items() if name != "bound_for"}, "")
        bounds = {"lower_bound_ms": values.pop("lower_bound_ms", 0.0), "n_states": values.pop("n_states", 0)}
        if values.pop("bound_for", None) != _take_digest(ir):
            # Costs, machine or workload were edited: the bound says nothing of the new ones.
            bounds, proof = {"lower_bound_ms": 0.0, "n_states": 0}, None
            steps = ("step_ms", "step_lower_bound_ms", "compared", "compared_counts")
            values = {name: value for name, value in values.items() if name not in steps}
        split = [record.make_row(_Split, row, "stages") for row in rows]
        lacking = sorted(set(costs.by_name) ^ {name for s in split for name in s.nodes})
        if lacking:
            record.fail(
                f"node {lacking[0]!r} is only in the stages, or only in the costs: a stage has each node", "stages"
            )
        most = max((d for s in split for d in s.devices), default=0)
        if most >= len(machine):
            record.fail(f"a stage is on device {most}, and there are devices 0 to {len(machine) - 1}", "stages")
        try:
            priced = price_split(costs, machine, workload, [(s.nodes, s.devices, s.recompute) for s in split], model)
            plan = cls.assemble(tuple(priced), costs, machine, workload, model, **bounds)
            return replace(plan, **values).prove(proof)
        except (FxsplitError, TypeError, ValueError, KeyError, IndexError) as error:
            return record.fail(f"the stages cannot be priced ({type(error).__name__}: {error})", "stages")

    def summarise(self) -> str:
        """Return the number of stages, the schedule, the bottleneck and the proof."""
        stages = format_count(len(self.stages), "stage")
        figure = f"bottleneck {self.bottleneck_ms:.3f} ms"
        if self.minimised == "step":
            figure = f"step {self.step_ms:.3f} ms"
        return f"{stages}, {self.schedule}, {figure}, {self.standing}"

    def show(self) -> Parts:
        """Return a table of times and bytes of the stages, one of their nodes, and lines about the bottleneck."""
        if self.step_speedup is not None and self.step_speedup < 1 - PROVEN:
            yield (
                f"slower than one device: a step takes {self.step_ms:.3f} ms, and one device with room for the model "
                f"runs this batch in {self.single_step_ms:.3f} ms"
            )
        yield Table(*self._list_figures())
        yield Table(
            ("stage", ">nodes", "first .. last in graph order"),
            [(i, len(s.nodes), s.place) for i, s in enumerate(self.stages)],
        )
        yield self._describe_proof()
        yield self._describe_speedup()
        yield f"{self.schedule}, {format_count(self.n_microbatches, 'microbatch')} of {format_count(self.rows, 'row')}"
        yield from self._describe_counts()
        if self.fixed_rows:
            sizes = " and ".join(map(str, self.fixed_rows))
            yield (
                f"the graph is for microbatches of {sizes} rows only, since forward() makes its number of rows a "
                "constant; microbatches of another size get a graph of their own"
            )
        if self.shared_ms:
            yield (
                "stages that share a GPU take turns on it, and are planned as on GPUs of their own: a step takes "
                f"{self.n_microbatches * self.shared_ms:.3f} ms at least"
            )
        if self.measured_on:
            yield f"measured on: {self.measured_on}"
        if self.estimated:
            yield self.estimated.details
        if self.compress:
            yield f"cuts are compressed ({self.compress}): {self._describe_sent()}"
        own = next((choice for choice in self.compared if choice.schedule == self.schedule), None)
        if own is not None:
            shortest = "the shortest" if own is self.compared[0] else "the shortest that fits in memory"
            others = ", ".join(str(choice) for choice in self.compared if choice is not own)
            yield f"{self.schedule}, since its simulated step of {own.step_ms:.3f} ms is {shortest}: {others}"

    def embed(self) -> str:
        """Return the picture of the plan as HTML, for notebooks."""
        return str(import_above("report.picture").embed_plan(self))

    def picture(self, path: str | os.PathLike[str], *, dark: bool = False) -> None:
        """Draw the graph with its stages and cuts, the load of each stage, and its memory beside the limit.

        path: ends in .svg, .png or .pdf; the last two need matplotlib.
        dark: on dark paper.

        A plan that was read from a file knows only the ends of its stages, unless it was read with its profile. Raises
        InputError for another ending, and FileError if the file cannot be written.
        """
        import_above("report.picture").save_plan_picture(self, path, dark=dark)

    def _describe_speedup(self) -> str:
        """Return the speed-up over one device: of a step if that was minimised, else of a pipeline in steady state."""
        if self.minimised == "bottleneck" or self.step_speedup is None:
            return f"steady-state speed-up {self.speedup:.2f} over one device"
        return f"speed-up {self.step_speedup:.2f} over one device for this batch"

    def _describe_counts(self) -> Parts:
        """Yield lines on the other numbers of microbatches, and on times that were not measured."""
        others = [count for count in self.compared_counts if count.n_microbatches != self.n_microbatches]
        if others:
            note = "; ~: interpolated" * any(count.between for count in others)
            yield f"{format_count(self.n_microbatches, 'microbatch')}, as no other number has a shorter step: " + (
                f"{', '.join(map(str, others))}{note}"
            )
        if self.interpolated_between:
            yield "times are interpolated between profiles of {} and {} rows".format(*self.interpolated_between)

    def _describe_proof(self) -> str:
        """Return the figure that was minimised, its lower bound and the proof, for people."""
        figure, ms, low = "bottleneck", self.bottleneck_ms, self.lower_bound_ms
        if self.step_ms is not None and self.step_lower_bound_ms is not None:
            figure, ms, low = "step", self.step_ms, self.step_lower_bound_ms
        # A bound that nobody has proven is no bound.
        bound = f"lower bound {low:.3f} ms, " * (self.standing != "not proven")
        among = f" among {self.n_states} states" * bool(bound)
        return f"{figure} {ms:.3f} ms{format_spread(self.spread)}, {bound}{self.standing}{among}"

    def _list_figures(self) -> tuple[list[str], list[list[str]]]:
        """Return the column heads of the table of stages, and a row for each stage."""
        # A CPU launches nothing, and needs no column for it.
        launched = any(s.launch_ms for s in self.stages)
        heads = ["stage", "device", ">fwd ms", ">bwd ms", ">xfer ms", *[">launch ms"] * launched]
        rows = []
        for i, s in enumerate(self.stages):
            times = [s.forward_ms, s.backward_ms, s.transfer_ms, *[s.launch_ms] * launched]
            sizes = map(format_bytes, (s.in_bytes, s.out_bytes, s.memory_bytes))
            names = "+".join(self.device_names[d] for d in s.devices)
            rows.append([str(i), names, *(f"{ms:.3f}" for ms in times), *sizes])
        return [*heads, ">in", ">out", ">memory"], rows


def _take_digest(ir: IR) -> str:
    """Return a number that changes with the costs, the machine and the workload that a lower bound holds for."""
    facts: tuple[Costs | Machine | Workload, ...] = (ir[Costs], ir[Machine], ir[Workload])
    texts = [write_record(fact.to_record(ir)) for fact in facts]
    return f"crc32:{zlib.crc32(''.join(texts).encode()):08x}"


@dataclass(frozen=True)
class _Split:
    """A stage as a plan without figures states it."""

    devices: tuple[int, ...]
    nodes: tuple[str, ...]
    recompute: bool = False


def _list_crossing(costs: Costs, inside: Collection[str]) -> list[str]:
    """Return the values that cross a cut after the nodes `inside`, with their bytes forward and back, for people."""
    return [
        f"%{name} {format_bytes(there)}" + (f" + {format_bytes(back)} back" if back else "")
        for name, there, back, readers, returned in costs.values
        if (name in inside or name not in costs.by_name) and (returned or any(r not in inside for r in readers))
    ]


def _find_shared_ms(stages: Sequence[StagePlan], machine: Machine) -> float:
    """Return the work of a microbatch on the busiest accelerator with several stages, in ms; 0 without one."""
    work: dict[object, list[float]] = {}
    for stage in stages:
        for d in stage.devices:
            device = machine.devices[d].torch_device
            # Devices on the CPU have cores of their own.
            if device is not None and device.type != "cpu":
                work.setdefault(device, []).append(stage.forward_ms + stage.backward_ms)
    return max((sum(times) for times in work.values() if len(times) > 1), default=0.0)


def format_spread(spread: float | None) -> str:
    """Return the spread of predicted times for people, to follow a time; empty if it is unknown."""
    return "" if spread is None else f" ± {100 * spread:.0f} %"
