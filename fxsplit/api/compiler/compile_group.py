"""Let the ranks of a pipeline compile one program: the first rank measures, plans and sends out the plan.

The other ranks wait meanwhile, so that they do not load the machine that is measured. Costs and plan travel as JSON,
which is read as data.

  rank 0         meet -> capture -> profile -> search -> lower -> end: compare graphs and programs
                   |                             | SharedPlan       |
  other ranks    meet -> wait .................. capture -> lower -> end
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import inf
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch

from fxsplit.api.compiler.options import Candidate, CompileOptions
from fxsplit.errors import InputError, RankError, RanksDiffer
from fxsplit.formats.plan_json import parse_plan, plan_to_dict
from fxsplit.ir.chain import Chain
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import GPU_LINK_BYTES_PER_S, Device, Machine
from fxsplit.ir.facts.given.torch_devices import read_memory
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.graph import IR, name_pass
from fxsplit.ir.text.write import render_graph
from fxsplit.runtime.backends.backend import Backend
from fxsplit.runtime.backends.threads import ThreadBackend
from fxsplit.runtime.ranks.backend import RankBackend
from fxsplit.runtime.ranks.gradients.reduction import GradientReduction, check_bucket_bytes
from fxsplit.runtime.ranks.weight_placement import WeightPlacement, list_named
from fxsplit.runtime.ranks.world.agreement import ALIKE, Agreement, hash_text, sum_values
from fxsplit.runtime.ranks.world.world import COMPILE_LIMIT_S, World
from fxsplit.schedule.generators.catalogue import ASYNCHRONOUS, Scheduler
from fxsplit.schedule.of_plan import find_replicas
from fxsplit.schedule.schedule_plan import schedule_plan
from fxsplit.schedule.torch_csv import format_csv
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals.fake.without_weights import lacks_values

T = TypeVar("T")
GradientHook: TypeAlias = "str | tuple[Any, Callable[[Any, Any], Any]]"
"""How gradients are added over ranks: a name, or a state and a hook as torch's DDP takes them."""
SEARCH = ("augment", "order", "partition")
"""The passes that search for a plan. Ranks that receive a plan do not run them."""

ALL_ALIKE = (
    "All pipelines of a mesh compile together, with the same code and options, for one shape on all ranks: if their "
    "batches have different numbers of rows, call pipe.eval().compile_for(x) with one shape before the first batch"
)
"""The advice in an error if ranks of a mesh differ as they compile."""


@dataclass(frozen=True)
class TakePlan:
    """A pass that takes the plan of the first rank in place of a search."""

    plan: Plan

    name: ClassVar[str] = "take-plan"
    ignores_mode: ClassVar[bool] = True

    def __call__(self, ir: IR) -> IR:
        """Learn Plan, and the Workload of the schedule that it states, if it states one."""
        if not self.plan.schedule_csv or ir[Workload].schedule_csv:
            return ir.learn(self.plan)
        _, workload, _ = schedule_plan(self.plan, ir[Costs], ir[Machine], ir[Workload])
        return ir.learn(workload, self.plan)


@dataclass(frozen=True, eq=False)
class SharedPlan:
    """The result of the first rank: a candidate with its costs and plan.

    shared: whether an earlier program serves this call.
    costs: None if the chain measures nothing.
    moves_weights: as in `Compiled`.
    """

    shared: bool
    candidate: Candidate
    costs: Costs | None
    plan: Plan
    moves_weights: bool

    def to_text(self) -> str:
        """Return the plan and costs as JSON."""
        scheduler = self.candidate.scheduler
        return json.dumps(
            {
                "shared": self.shared,
                "scheduler": [scheduler.name, scheduler.n_devices, scheduler.stages_per_device],
                "n_microbatches": self.candidate.n_microbatches,
                "costs": None if self.costs is None else self.costs.to_text(),
                "plan": plan_to_dict(self.plan),
                "moves_weights": self.moves_weights,
            }
        )

    @classmethod
    def parse(cls, data: dict[str, Any]) -> SharedPlan:
        """Return the plan and costs from the JSON of the first rank."""
        costs = data["costs"]
        plan = parse_plan(data["plan"], "the first rank's plan")
        return cls(
            shared=data["shared"],
            candidate=Candidate(Scheduler(*data["scheduler"]), data["n_microbatches"]).follow(plan),
            costs=None if costs is None else Costs.parse(json.loads(costs), "the first rank's profile"),
            plan=plan,
            moves_weights=data["moves_weights"],
        )

    def apply(self, options: CompileOptions) -> CompileOptions:
        """Return options with a chain that takes this plan, and measures nothing."""
        # The pass that compresses cuts is added first: it goes before `augment`, which is skipped below, and the plan
        # was made from the costs after it.
        chain = options.compressing
        names = [name_pass(step) for step in chain]
        if "partition" in names:
            at = names.index("partition")
            # If the user put a pass between these, `augment` and `order` run here too: that pass may read their facts.
            skipped = set(SEARCH) if names[at - 2 : at + 1] == list(SEARCH) else {"partition"}
            # The plan states the schedule that the first rank found.
            skipped |= {"schedule"} if self.plan.schedule_csv else set()
            kept = [TakePlan(self.plan) if n == "partition" else p for n, p in zip(names, chain, strict=True)]
            chain = Chain(tuple(p for n, p in zip(names, kept, strict=True) if n == "partition" or n not in skipped))
        count = options.n_microbatches
        if self.costs is not None and not isinstance(count, int):
            count = self.candidate.n_microbatches
        # The first rank has chosen the schedule, so it is no longer open.
        schedule = options.schedule if options.inference else options.schedule or self.plan.schedule
        costs = self.costs or options.costs
        # The chain has the passes of `compress` and `best` already.
        chosen = replace(options, best=False, compress=None, schedule=schedule, n_microbatches=count)
        return replace(chosen, chain=chain, costs=costs)


class CompileGroup:
    """The ranks that compile one pipeline. `label` names the pipeline on all ranks; `reduction` adds gradients."""

    def __init__(self, world: World, reduction: GradientReduction) -> None:
        self.world = world
        self.reduction = reduction
        self.label = world.begin_pipeline(self)
        self.placement = WeightPlacement(world, self.label)
        # With a mesh, rank 0 of all ranks plans for all pipelines.
        self._whole = world.whole
        self._has_met = False
        self._agreement = Agreement(world.whole, ALIKE if len(world.rows) == 1 else ALL_ALIKE)

    @property
    def leads(self) -> bool:
        """Whether this rank measures and plans."""
        return self._whole.me == 0

    @contextmanager
    def meet(
        self, options: CompileOptions, model: torch.nn.Module, inputs: str, *, from_shapes: bool
    ) -> Iterator[None]:
        """Wait for all ranks, and compile in the block. Raises RanksDiffer for another model, options or versions.

        After a compile a rank keeps only the weights of its stages. In the block each rank has the values of all
        weights again, or with `from_shapes` only those of buffers: all weights may not fit in one rank's memory.
        """
        weights = [(n, tuple(w.shape), str(w.dtype), w.requires_grad) for n, w in list_named(model)]
        stated = [options.schedule, options.stages_per_device, options.n_microbatches, options.recompute]
        stated += [] if options.fixed is None else [format_csv(options.fixed)]
        stated += [options.deferred_batch_norm, options.stage_backend, options.inference, str(options.chain)]
        stated += [str(self.reduction)]
        program = (
            f"fxsplit {version('fxsplit')}, torch {torch.__version__}, Python {platform.python_version()}, "
            f"{type(model).__name__} in {'training' if model.training else 'evaluation'} with weights "
            f"{hash_text(str(weights)):x}{self._sum_weights(model)}, and options {stated}"
        )
        with self._whole.watch(COMPILE_LIMIT_S):
            call = f"compile number {self._whole.count('compile of ' + self.label)} of {self.label}"
            self._agreement.meet({"call": call, "program": program, "inputs": inputs}, 0)
            if len(self.world.rows) == 1 and not self._has_met:
                self._warn_of_other_weights(model)
            self._has_met = True
            with self._whole.stop_clock(), self.placement.lend(_list_lent(model, from_shapes=from_shapes)):
                yield

    def fit(self, model: torch.nn.Module, fit: Callable[[], T | None], *, from_shapes: bool) -> T | None:
        """Return the graph that `fit` returns, if it finds one on all ranks of the pipeline; None otherwise.

        `fit` checks whether an existing graph is right for other shapes, with the values of all weights (see `meet`).
        Each rank calls `fit` by itself. If only some ranks find a graph, since rounding differs, all ranks compile.
        Raises RanksDiffer if a rank makes another call.
        """
        agreed = self.placement.agree("other shapes", limit_s=COMPILE_LIMIT_S)
        with agreed, self.world.stop_clock(), self.placement.lend(_list_lent(model, from_shapes=from_shapes)):
            found = fit()
            there = self.world.gather(torch.tensor([int(found is not None)]), "other shapes")
        return found if all(map(int, there)) else None

    def tell(self, find: Callable[[], SharedPlan] | None) -> SharedPlan | None:
        """Send the plan of the first rank to the other ranks, and return it on them.

        Only the first rank gives `find`, which returns the plan. The first rank returns None, or raises the error of
        `find`; then the other ranks raise RankError.
        """
        what = "the plan"
        if find is not None:
            try:
                text = find().to_text()
            except BaseException as error:
                self._whole.tell(json.dumps({"error": f"{type(error).__name__}: {error}"}), what, patient=True)
                raise
            self._whole.tell(text, what, patient=True)
            return None
        data = json.loads(self._whole.tell(None, what, patient=True))
        if "error" in data:
            raise RankError(f"rank 0, which plans for all ranks, failed: {data['error']}")
        return SharedPlan.parse(data)

    def end(self, error: BaseException | None, graph: str, program: str) -> None:
        """End a compile on all ranks. Raises RanksDiffer if graphs or programs differ, or the first error of any rank.

        graph, program: texts that must be equal on all ranks; empty if a rank has none.
        """
        # First of all: a rank with another graph may fail in many ways, and its error explains less.
        self._compare(graph, "has captured the graph", error)
        if error is not None:
            raise error
        self._compare(program, "has compiled", None)

    def check_sums(self, plan: Plan, scheduler: Scheduler) -> None:
        """Raise InputError if the gradient hook cannot be used with this plan."""
        self.reduction.check_homes(find_replicas(plan) or scheduler.homes(len(plan.stages)))

    def _compare(self, own: str, sentence: str, error: BaseException | None) -> None:
        """Raise RanksDiffer if a rank's text differs from rank 0's. A rank without a text has failed."""
        texts = self._whole.gather_texts(own, "the end of a compile")
        odd = next((rank for rank, text in enumerate(texts) if text.strip() not in ("", texts[0].strip())), None)
        if odd is not None and texts[0].strip():
            raise RanksDiffer(
                f"rank {odd} {sentence} {texts[odd]}; rank 0 {sentence} {texts[0]}. Every rank builds the same model "
                "with the same code, and calls it with the same arguments"
            ) from error

    def _sum_weights(self, model: torch.nn.Module) -> str:
        """Return a checksum of the initial weights, equal in all pipelines of a mesh; "" for a single pipeline."""
        # Later a rank has only the weights of its stages.
        if len(self.world.rows) == 1 or self._has_met or lacks_values(model):
            return ""
        return f" of checksum {sum_values([weight for _, weight in list_named(model)]):x}"

    def _warn_of_other_weights(self, model: torch.nn.Module) -> None:
        """Warn if ranks of one pipeline start with different weights: each stage keeps the weights of its own rank."""
        # A rank without values will load them later, as from a checkpoint.
        sums = {} if lacks_values(model) else {name: sum_values(weight) for name, weight in list_named(model)}
        found = [json.loads(text) for text in self._whole.gather_texts(json.dumps(sums), "the start of a compile")]
        first = next((rank for rank, sums in enumerate(found) if sums), 0)
        odd = [
            (rank, n) for rank, sums in enumerate(found) for n, value in sums.items() if value != found[first].get(n)
        ]
        if odd:
            rank, name = odd[0]
            warn_user(
                f"rank {rank} begins with other weights than rank {first}, such as {name!r}, and each stage keeps the "
                "weights of its own rank, so the pipeline is a mixture of both: build the model from one seed on all "
                "ranks, torch.manual_seed(0), or load the same weights on each"
            )


def _list_lent(model: torch.nn.Module, *, from_shapes: bool) -> dict[str, torch.Tensor]:
    """Return the weights, by name, that ranks lend each other for a compile: only buffers for a model `from_shapes`."""
    return dict(model.named_buffers() if from_shapes else list_named(model))


def make_compile_group(world: World | None, options: CompileOptions) -> CompileGroup | None:
    """Return the ranks that compile with these options; None if this process runs everything.

    Raises InputError for gradient_hook= or bucket_bytes= without ranks, and for an asynchronous schedule on a mesh.
    """
    if world is None:
        given = {"gradient_hook": options.gradient_hook, "bucket_bytes": options.bucket_bytes}
        name = next((name for name, value in given.items() if value is not None), None)
        if name is not None:
            check_bucket_bytes(options.bucket_bytes)
            raise InputError(
                f"{name}={given[name]!r} says how gradients are added over ranks, and all devices are of this process: "
                "give a mesh of two dimensions, mesh['dp', 'pp'], under a launcher, or leave it out"
            )
        return None
    if len(world.rows) > 1 and options.schedule in ASYNCHRONOUS:
        raise InputError(
            f"schedule={options.schedule!r} steps between microbatches, and pipelines of a mesh add their gradients "
            "once a step: give 1F1B, or a mesh of one dimension"
        )
    return CompileGroup(world, GradientReduction(world, options.gradient_hook, options.bucket_bytes))


def describe_graph(captured: IR) -> str:
    """Return a text that is equal on two ranks if they captured the same graph: its hash and its number of nodes."""
    # Addresses of objects and numbers of GPUs differ between processes.
    modules = [repr(captured.gm.get_submodule(str(n.target))) for n in captured.gm.graph.find_nodes(op="call_module")]
    # No shapes: the size of a boolean selection depends on the values in the rows of each pipeline.
    lines = [render_graph(captured.gm, shapes=False), *modules]
    text = re.sub(r"0x[0-9a-f]+|index=\d+|cuda:\d+", "", "\n".join(lines))
    return f"{hash_text(text):x} of {len(captured.gm.graph.nodes)} nodes"


def describe_program(plan: Plan, options: CompileOptions) -> str:
    """Return a text that is equal on two ranks if they compiled the same graph to the same program."""
    return f"plan {hash_text(json.dumps(plan_to_dict(plan))):x}, recompute={options.recompute!r}"


def make_machine(world: World) -> Machine:
    """Return a machine with a device for each rank, which every rank sees as its own device of torch."""
    memory = read_memory(world.device)
    # All pipelines of a mesh have one plan, so a stage gets the smallest memory of the ranks that run it.
    with world.whole.watch():
        # Other ranks may instead be in a call of an existing pipeline: this check reports it.
        Agreement(world.whole).meet({"call": "the compile of another pipeline"}, 0)
        found = world.whole.gather(torch.tensor([memory], dtype=torch.float64), "the start")
    memory_of = {rank: float(one) for rank, one in zip(world.whole.ranks, found, strict=True)}
    least_bytes = [min(memory_of[rank] for rank in column) for column in zip(*world.rows, strict=True)]
    devices = tuple(Device(f"rank{i}", world.device, memory_bytes) for i, memory_bytes in enumerate(least_bytes))
    links = (inf if world.device.type == "cpu" else GPU_LINK_BYTES_PER_S for _ in least_bytes[1:])
    return Machine(devices, tuple(links))


def make_backend(machine: Machine, compile_group: CompileGroup | None) -> Backend:
    """Return the backend to run on: a thread for each device of a machine, or this process as one rank of its group."""
    if compile_group is not None:
        return RankBackend(compile_group.world, compile_group.label, compile_group.placement, compile_group.reduction)
    return ThreadBackend(machine.torch_devices(), machine.intraop_threads(), [d.name for d in machine.devices])
