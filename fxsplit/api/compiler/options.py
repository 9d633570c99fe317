"""The options of compile(), checked once, and the same for every mode and shape.

A *candidate* is a choice that the options leave open: a schedule with a number of microbatches, such as 1F1B with 4.

The chain of passes grows in four steps:

    chain        as the user gave it
    planning     with `partition` for the shortest step (best=)
    compressing  with compressed cuts (compress=)
    passes       with `schedule` and `batch-norm`: the chain that runs
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fxsplit.api.compiler.microbatch_count import (
    AUTO,
    check_microbatch_count,
    choose_microbatch_count,
    list_microbatch_counts,
)
from fxsplit.errors import InputError, ScheduleError, suggest
from fxsplit.ir.chain import Chain, pass_text
from fxsplit.ir.facts.capture.chunks import Chunks, check_chunks
from fxsplit.ir.facts.costs.compress import check_compress
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.graph import ignores_mode, name_pass
from fxsplit.ir.manager import Observer
from fxsplit.passes import BatchNorm, Cut, Partition
from fxsplit.passes.schedule import PLANNED, SchedulePlan
from fxsplit.planner.step.step import SCHEDULES
from fxsplit.runtime.loss.loss import LossFn
from fxsplit.runtime.stage.recompute import POLICIES
from fxsplit.schedule import RUNNABLE, Schedule, find_schedule
from fxsplit.schedule.generators.catalogue import FROM_TIMES, INFERENCE, SEARCH, Scheduler
from fxsplit.schedule.of_plan import build_schedule
from fxsplit.schedule.schedule_plan import simulate_step
from fxsplit.schedule.torch_csv import parse_csv
from fxsplit.system.figures import check_flag, format_count, is_count, show
from fxsplit.torch_internals.torch_compile.stage_backends import RECORDING, records_cuda_graphs


@dataclass(frozen=True)
class Candidate:
    """A schedule on the machine's devices, and a number of microbatches: one way to compile a model."""

    scheduler: Scheduler
    n_microbatches: int

    @property
    def name(self) -> str:
        """The schedule and the number, such as `1F1B-4`."""
        return f"{self.scheduler.name}-{self.n_microbatches}"

    def follow(self, plan: Plan) -> Candidate:
        """Return the candidate with the schedule that was chosen for a plan, or itself if none was chosen."""
        if plan.schedule == SEARCH and plan.schedule_csv:
            # A searched order says itself where the second stages of devices are.
            stated = parse_csv(plan.schedule_csv, plan.schedule)
            return replace(self, scheduler=Scheduler.of(stated)) if stated.shares_devices else self
        if not plan.compared or plan.schedule == self.scheduler.name:
            return self
        return replace(self, scheduler=Scheduler(plan.schedule, self.scheduler.n_devices))

    def predict_step_ms(self, plan: Plan) -> float:
        """Return the simulated time of a training step with a plan for this candidate, in milliseconds."""
        schedule = build_schedule(plan, self.follow(plan).scheduler, self.n_microbatches)
        return simulate_step(plan, schedule)

    def __str__(self) -> str:
        return f"{self.scheduler.name} with {format_count(self.n_microbatches, 'microbatch')}"


@dataclass(frozen=True, eq=False, kw_only=True)
class CompileOptions:
    """The options that a model is compiled with. Fields have the names and meanings of compile()'s arguments.

    Raises InputError or ScheduleError for an option that no model could be compiled with.
    """

    machine: Machine
    chain: Chain
    schedule: str | None = None
    # The schedule itself, if it is stated action by action; `schedule` is its name.
    fixed: Schedule | None = None
    stages_per_device: int | None = None
    n_microbatches: int | str | None = None
    loss_fn: LossFn | None = None
    recompute: str = "plan"
    deferred_batch_norm: bool = False
    stage_backend: str | None = None
    inference: bool = False
    best: bool = False
    chunks: Chunks | None = None
    costs: Costs | None = None
    compress: str | None = None
    gradient_hook: object = None
    bucket_bytes: float | None = None
    dump: str | os.PathLike[str] | None = None
    observers: tuple[Observer, ...] = ()
    check_rewrites: bool = True
    reproducer: str | os.PathLike[str] | None = None
    # Not an argument of compile(). False for a pipeline that verify() compiles: it is neither dumped nor printed.
    observed: bool = True
    # Not an argument either: whether `costs` are of the model that this one is a copy of, in other dtypes.
    costs_by_name: bool = False
    # Not an argument either: whether one compile serves all lengths that an exported graph has symbols for.
    lengths_open: bool = False
    # Not an argument either: whether other pipelines have other rows of the batch, as over a mesh of two dimensions.
    side_by_side: bool = False

    def __post_init__(self) -> None:
        if self.n_microbatches not in (None, AUTO):
            check_microbatch_count(self.n_microbatches, ", 'auto', or leave it out")
        # Saved costs are of one microbatch size, and a search looks at several.
        if self.n_microbatches == AUTO and self.costs is not None:
            raise InputError("n_microbatches='auto' measures microbatches of every size: leave costs= out")
        # It is easy to pass a loss class in place of its instance, and a class is callable.
        if self.loss_fn is not None and (not callable(self.loss_fn) or isinstance(self.loss_fn, type)):
            raise InputError(
                f"loss_fn={self.loss_fn!r} is no function or module: give loss_fn(outputs, target) -> scalar"
            )
        if not (self.dump is None or isinstance(self.dump, (str, os.PathLike))):
            raise InputError(f"dump={self.dump!r}: give the path of a folder")
        if not (self.reproducer is None or isinstance(self.reproducer, (str, os.PathLike))):
            raise InputError(f"reproducer={self.reproducer!r}: give the path of a folder")
        odd = next((o for o in self.observers if not isinstance(o, Observer)), None)
        if odd is not None:
            raise InputError(f"observers has {show(odd)}: give objects of a subclass of fxsplit.Observer")
        check_flag("check_rewrites", self.check_rewrites)
        check_chunks(self.chunks)
        check_compress(self.compress)
        if not (self.stages_per_device is None or is_count(self.stages_per_device, least=1)):
            raise InputError(f"stages_per_device={show(self.stages_per_device)}: give a number of at least 1")
        if not (self.schedule is None or isinstance(self.schedule, str)):
            raise InputError(f"schedule={show(self.schedule)}: give the name of a schedule, 'auto', or leave it out")
        if not isinstance(self.recompute, str) or self.recompute not in POLICIES:
            hint = suggest(self.recompute, POLICIES)
            raise InputError(f"recompute={show(self.recompute)}: give one of {', '.join(POLICIES)}{hint}")
        check_flag("inference", self.inference)
        check_flag("best", self.best)
        if self.best:
            self._check_best()
        check_flag("deferred_batch_norm", self.deferred_batch_norm)
        if self.inference and (self.planned_schedule, self.stages_per_device) != (PLANNED, None):
            raise InputError(
                f"schedule={self.schedule!r} with inference=True: without backwards there is one schedule, so leave "
                "schedule= and stages_per_device= out"
            )
        if self.inference and self.recompute != "plan":
            raise InputError(
                f"recompute={self.recompute!r} with inference=True: without backwards nothing is recomputed, so leave "
                "recompute= out"
            )
        if self.stage_backend is not None:
            check_stage_backend(self.stage_backend, self.machine)
        # "auto" tries only schedules that can run, so there is nothing to check.
        if self.schedule != AUTO:
            self._check_schedule()

    def _check_best(self) -> None:
        """Raise InputError for an option that `best` cannot be given with."""
        if self.inference:
            raise InputError("best=True with inference=True: a step is one of training, so leave one of them out")
        if self.schedule == AUTO or self.fixed is not None:
            raise InputError(
                f"schedule={self.schedule!r} with best=True: the best plan has an order of work of its own, so leave "
                f"schedule out, or give one of {', '.join(SCHEDULES)}"
            )
        if not any(isinstance(step, Partition) for step in self.chain):
            raise InputError(
                "best=True plans the stages with the pass partition, which the chain lacks: leave plan= out, or put "
                "partition into passes="
            )

    def _check_schedule(self) -> None:
        """Raise InputError or ScheduleError for a schedule that cannot run with the other options."""
        if self.fixed is None:
            find_schedule(self.planned_schedule)
        else:
            check_fixed(self.fixed, len(self.machine), self.stages_per_device)
        # A schedule itself checks the numbers that it is made for, and making one is quick.
        self.schedulers[0].homes()
        if self.stated_count is not None:
            self.schedulers[0].schedule(self.stated_count)

    @property
    def planned_schedule(self) -> str:
        """The schedule that plans are made for. If none is stated, one is chosen for the plan."""
        # torch.compile makes one function of a stage's backward, which a free order of work would split.
        usual = SEARCH if self.best and self.stage_backend is None else PLANNED
        return usual if self.schedule is None else self.schedule

    @property
    def planned_recompute(self) -> str:
        """Which stages a plan counts as recomputing: all, none, or those that the planner chooses.

        With "except_last" a plan counts none: such a stage needs no more memory than one that keeps all activations.
        """
        return "never" if self.recompute == "except_last" else self.recompute

    @cached_property
    def schedulers(self) -> Sequence[Scheduler]:
        """The stated schedule, or all schedules that "auto" may choose from; for inference the schedule INFERENCE."""
        if self.inference:
            return [Scheduler(INFERENCE, len(self.machine))]
        if self.fixed is not None:
            return [Scheduler.of(self.fixed)]
        return list_schedulers(self.planned_schedule, len(self.machine), self.stages_per_device)

    def for_inference(self) -> CompileOptions:
        """Return the same options for a plan without backwards."""
        return replace(
            self, inference=True, best=False, schedule=None, fixed=None, stages_per_device=None, recompute="plan"
        )

    @cached_property
    def passes(self) -> Chain:
        """The chain, with the passes schedule and batch-norm if `chain` lacks them and they are needed.

        A user's chain need not name batch-norm, but without the pass replicas would write statistics in no order.
        """
        chain = self.compressing
        names = [name_pass(step) for step in chain]
        # The pass partition chooses the order of work of the best plan. Otherwise the pass schedule chooses it, or
        # makes it from the times of the plan's stages.
        open_ = self.fixed is None and not self.inference and not self.best
        ordered = open_ and self.schedule in (None, AUTO, SEARCH, *FROM_TIMES)
        if ordered and SchedulePlan.name not in names and "emit" in names:
            # torch.compile makes one function of a stage's backward, which cannot be split.
            chosen = SchedulePlan(choose=True, splits=self.stage_backend is None)
            step = chosen if self.schedule is None else SchedulePlan()
            # Directly after the plan is made: a later pass may rewrite the graph, and then the costs are gone.
            planned = [at for at, known in enumerate(chain.passes, 1) if Plan in getattr(known, "learns", ())]
            at = max(planned, default=names.index("emit"))
            chain = Chain((*chain.passes[:at], step, *chain.passes[at:]))
        if BatchNorm.name not in names:
            return Chain((*chain, BatchNorm(self.deferred_batch_norm)))
        return chain.replace(BatchNorm.name, BatchNorm(deferred=True)) if self.deferred_batch_norm else chain

    @property
    def way_to_compress(self) -> str:
        """How cuts are compressed, by the option or by a pass; "" if they are not."""
        return next((step.compress for step in self.passes if isinstance(step, Cut)), "")

    @property
    def planning(self) -> Chain:
        """The chain, with the pass partition for the shortest step if the option `best` is given."""
        if not self.best:
            return self.chain
        step, usual = next(step for step in self.chain if isinstance(step, Partition)), Partition()
        chosen = replace(
            step,
            objective="step",
            use_all=False,
            model="replicated" if step.model == usual.model else step.model,
            recompute="auto" if step.recompute == usual.recompute else step.recompute,
        )
        return self.chain.replace(Partition.name, chosen)

    @property
    def compressing(self) -> Chain:
        """The chain for planning, with a pass that compresses cuts if the option `compress` is given."""
        chain = self.planning
        if self.compress is None:
            return chain
        cuts = [step for step in chain if isinstance(step, Cut)]
        if not cuts:
            return chain.before("augment", Cut(compress=self.compress))
        if any(step.compress not in ("", self.compress) for step in cuts):
            raise InputError(f"compress={self.compress!r}, and a pass {pass_text(cuts[0])}: state one way")
        return chain.replace("cut", *(replace(step, compress=self.compress) for step in cuts))

    @cached_property
    def ignores_mode(self) -> bool:
        """Whether every pass states that it makes the same result of the same graph in both modes."""
        return all(ignores_mode(step) for step in self.passes)

    @property
    def stated_count(self) -> int | None:
        """The number of microbatches that the user stated; None if fxsplit chooses it."""
        return self.n_microbatches if isinstance(self.n_microbatches, int) else None

    def count_microbatches(self, scheduler: Scheduler, rows: int, found: int | None = None) -> int:
        """Return the number of microbatches for a batch of `rows`; `found` is the choice of an earlier search."""
        # A schedule that is stated action by action states their number too.
        stated = self.stated_count if self.fixed is None else self.stated_count or self.fixed.n_microbatches
        return choose_microbatch_count(len(self.machine), rows=rows, stated=stated, found=found, scheduler=scheduler)

    def list_candidates(self, rows: int) -> list[Candidate]:
        """Return every schedule with every number of microbatches that a batch of `rows` may be compiled with."""
        candidates = []
        for scheduler in self.schedulers:
            counts = [self.count_microbatches(scheduler, rows)]
            if self.n_microbatches == AUTO:
                counts = list_microbatch_counts(rows, len(self.machine))
            # A number that the schedule would round is no candidate: the rounded number is tried in its own turn.
            candidates += [Candidate(scheduler, n) for n in counts if n == scheduler.nearest(n)]
        return candidates


def check_fixed(schedule: Schedule, n_devices: int, stages_per_device: int | None) -> None:
    """Raise InputError for a schedule that is for other devices, or that does not train as the model itself does."""
    # A searched order leaves devices idle that do not help.
    if schedule.n_devices > n_devices or (schedule.n_devices < n_devices and schedule.name != SEARCH):
        raise InputError(
            f"schedule {schedule.name!r} is for {schedule.n_devices} devices, and there are {n_devices}: give "
            "devices= as many, or another schedule"
        )
    if stages_per_device is not None:
        raise InputError(f"stages_per_device={stages_per_device}: schedule {schedule.name!r} says where its stages are")
    if any(len(home) > 1 for home in schedule.homes):
        raise InputError(f"schedule {schedule.name!r} has stages on several devices: give its name, not a Schedule")
    if not (schedule.trains and schedule.synchronous):
        raise InputError(f"schedule {schedule.name!r} does not train in one step a batch: give one that does")


def check_stage_backend(backend: str, machine: Machine) -> None:
    """Raise InputError if `backend` is not a backend of torch.compile, or if it records CUDA graphs."""
    if backend not in torch.compiler.list_backends(()):
        known = [name for name in torch.compiler.list_backends() if name != RECORDING]
        raise InputError(
            f"stage_backend={backend!r} is none of torch.compile's: give one of {', '.join(known)}"
            f"{suggest(backend, known)}"
        )
    # On a CPU inductor records nothing, whatever is set. The backend that only records is of no use there.
    on_gpu = any(d.torch_device is not None and d.torch_device.type != "cpu" for d in machine.devices)
    if records_cuda_graphs(backend) and (on_gpu or backend == RECORDING):
        raise InputError(
            f"stage_backend={backend!r} records CUDA graphs, which torch keeps for one thread, and stages run in "
            "threads of their own: give 'inductor', with torch._inductor.config.triton.cudagraphs off, as it is by "
            "default (TORCHINDUCTOR_CUDAGRAPHS=1 sets it)"
        )


def load_costs(costs: Costs | str | os.PathLike[str] | None) -> Costs | None:
    """Return a profile, read from its file if `costs` is a path. Raises InputError or ProfileError."""
    if not (costs is None or isinstance(costs, (Costs, str, os.PathLike))):
        raise InputError(f"costs={costs!r}: give a profile (pipe.costs), or the path of a saved one")
    return Costs.load(costs) if isinstance(costs, (str, os.PathLike)) else costs


def list_schedulers(schedule: str, n_devices: int, stages_per_device: int | None) -> Sequence[Scheduler]:
    """Return the scheduler for `schedule`, or for "auto" all that can run on these devices and stages a device."""
    if schedule != AUTO:
        return [Scheduler(schedule, n_devices, stages_per_device)]
    found = []
    for name in RUNNABLE:
        scheduler = Scheduler(name, n_devices, stages_per_device)
        try:
            scheduler.homes()
        except ScheduleError:
            # Chimera, for example, takes an even number of devices: for three it is no candidate.
            continue
        found.append(scheduler)
    return found
