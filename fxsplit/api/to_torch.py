"""Export the stages of a pipeline to torch's own runtime, torch.distributed.pipelining, with a rank for each device."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fxsplit.api.compiler.compiled import Compiled
from fxsplit.api.compiler.options import CompileOptions
from fxsplit.errors import InputError, NotExportable
from fxsplit.frontend.meanings.losses import find_loss_counts
from fxsplit.frontend.watch.calls import CallWatch
from fxsplit.ir.facts.capture.call import Inputs
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.stages import Stages
from fxsplit.passes import CarryTensors
from fxsplit.runtime.loss.loss import LossFn, find_reduction, weigh_rows
from fxsplit.runtime.loss.meaning import LossMeaning
from fxsplit.runtime.program import Program
from fxsplit.schedule import Schedule
from fxsplit.schedule.torch_csv import format_csv
from fxsplit.system.imports import import_whole
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fx.interpret import describe_tensor
from fxsplit.torch_internals.fx.stage_values import list_outputs, record_values

if TYPE_CHECKING:  # imported later: torch's pipelining takes a second to load
    from torch.distributed.pipelining import PipelineStage

    from fxsplit.torch_internals.torch_pipelining import Runtime, StageTensors

LEAST_TORCH = "2.13"
"""The oldest torch with a runtime that was seen to run these exports; the runtime of 2.11 loses the connection."""


@dataclass(frozen=True, eq=False)
class TorchStages:
    """This rank's part of a pipeline in torch's runtime.

    stages: torch's PipelineStages, with modules that have the model's own parameters and buffers under the model's own
        names.
    schedule: torch's runtime for the stages.
    loss_scale: the factor by which `schedule` multiplies the loss of each microbatch.
    """

    stages: list[PipelineStage]
    schedule: Runtime
    loss_scale: float
    inputs: Inputs

    def step(self, *args: Any, target: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """Run one training step and add gradients to `.grad`; return the loss on the rank of the last stage.

        Every rank may give the whole batch and its target: each takes the part for its stages.
        """
        # A rank may have both the first stage and the last, if stages go there and back.
        first, last = (any(getattr(stage, what) for stage in self.stages) for what in ("is_first", "is_last"))
        tensors = self.inputs.bind(args, kwargs, None) if first else ()
        if not last:
            self.schedule.step(*tensors, return_outputs=False)
            return None
        losses: list[Tensor] = []
        self.schedule.step(*tensors, target=target, losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum()


def export_stages(compiled: Compiled, options: CompileOptions, group: dist.ProcessGroup | None) -> TorchStages:
    """Return torch's stages for this rank of a group, which has a rank for each device.

    Raises NotExportable for features that torch's runtime does not have, and InputError if ranks have different plans.
    """
    if torch.__version__ < LEAST_TORCH:
        raise NotExportable(
            f"the pipelining runtime of torch {torch.__version__} loses the connection between ranks: install torch "
            f"{LEAST_TORCH} or newer, or let fxsplit run the ranks, with compile(model, 'world')"
        )
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            "to_torch_stages() needs a process group: run the script with torchrun, and call "
            "torch.distributed.init_process_group() first"
        )
    # An interrupt would leave half of torch's pipelining imported.
    import_whole(["torch.distributed.pipelining.schedules"], if_there=True)
    from fxsplit.torch_internals.torch_pipelining import build_module, build_runtime, build_stage

    program, example = compiled.program, compiled.captured[Example]
    # First of all: if only one rank refused later, the other ranks would wait for it.
    _check_agreement(compiled, group)
    n_microbatches = _count_microbatches(compiled, options)
    schedule = program.schedule(n_microbatches)
    _check_schedule(program, schedule, dist.get_world_size(group))
    _check_weights(program)
    loss = TorchLoss(program, options.loss_fn, example.rows, n_microbatches)
    made = CarryTensors()(compiled.final.learn(example))[Stages]
    ends = _find_ends(made, example.tensors)
    rows = format_csv(schedule)
    rank = dist.get_rank(group)
    stages = [
        build_stage(
            build_module(stage.module, ends[stage.index], copies=program.writes_inputs),
            stage.index,
            len(made),
            program.devices[rank],
            ends[stage.index],
            group,
        )
        for stage in made.stages
        if schedule.homes[stage.index] == (rank,)
    ]
    dims = [spec.cut.dim for spec in example.inputs.specs]
    return TorchStages(stages, build_runtime(stages, rows, n_microbatches, loss, dims), loss.scale, example.inputs)


def _check_schedule(program: Program, schedule: Schedule, n_ranks: int) -> None:
    """Raise NotExportable for a schedule that torch's runtime cannot run, or for another number of ranks."""
    name = schedule.name
    if not schedule.trains:
        raise NotExportable(f"{name} trains nothing: compile without inference=True for torch's runtime")
    several = next((s for s, home in enumerate(schedule.homes) if len(home) > 1), None)
    if several is not None:
        raise NotExportable(
            f"{name}: stage {several} has {len(schedule.homes[several])} replicas, and torch's runtime runs each stage "
            "on one rank: plan with partition{model=forwarded}, and take another schedule than Chimera"
        )
    if not schedule.synchronous:
        raise NotExportable(
            f"{name} keeps several versions of weights, and torch's runtime keeps one: compile with schedule='1F1B' or "
            "another schedule that steps once a batch"
        )
    if n_ranks != schedule.n_devices:
        raise NotExportable(
            f"the plan has {schedule.n_devices} devices and the group {n_ranks} ranks: compile for as many devices as "
            "there are ranks, or give group="
        )
    recomputed = sorted(program.find_recomputed(schedule.n_microbatches))
    if recomputed:
        raise NotExportable(
            f"stage {recomputed[0][0]} recomputes its activations, and torch's runtime keeps them: compile with "
            "recompute='never', or put torch.utils.checkpoint into the model"
        )
    if program.compiling is not None:
        raise NotExportable(
            "stages are compiled by stage_backend=, and torch's runtime is given them as they are: compile without it, "
            "and call .compile() of each stage's submod"
        )


def _check_weights(program: Program) -> None:
    """Raise NotExportable for stages that share weights, statistics or random draws."""
    homes: dict[int, int] = {}
    for stage in program.stages.stages:
        for path, weight in stage.module.named_parameters():
            if homes.setdefault(id(weight), stage.index) != stage.index:
                raise NotExportable(
                    f"weight {path!r} is tied: stages {homes[id(weight)]} and {stage.index} have it, and torch's "
                    "runtime sums no gradients over ranks: pin the nodes that read it to one device (fxsplit.Pins), or "
                    "untie the modules"
                )
    if program.noted:
        raise NotExportable(
            "batch norms are deferred: their statistics change once a batch, which torch's runtime does not do; "
            "compile without deferred_batch_norm=True"
        )
    if program.detached is not None:
        raise NotExportable(f"the pipeline is {program.detached}: compile for training without that pass")
    if program.draws():
        raise NotExportable(
            "the model draws random numbers (dropout), and torch's runtime draws them from each rank's own generator, "
            "which gives other masks than the model: set p = 0, or model.eval(), before compiling"
        )


def _count_microbatches(compiled: Compiled, options: CompileOptions) -> int:
    """Return the number of microbatches of the example's batch. Raises NotExportable if their sizes differ."""
    specs = compiled.captured[Example].inputs.specs
    whole = next(s.shape[s.cut.dim] // s.cut.each for s in specs if s.cut.dim is not None)
    n_microbatches = compiled.adapt_candidate(options, whole).n_microbatches
    if whole % n_microbatches:
        raise NotExportable(
            f"the example's {whole} rows do not divide into {n_microbatches} microbatches, and torch's are all equal: "
            f"give {whole - whole % n_microbatches or n_microbatches} rows, or another n_microbatches"
        )
    return n_microbatches


class TorchLoss:
    """The loss of a microbatch, which torch's runtime calls with the outputs of the last stage.

    The loss is multiplied by the weight of the microbatch, so that those of all microbatches add up to the batch's.

    Raises InputError if a call shows that the loss has another meaning than `scale` is for.
    """

    def __init__(self, program: Program, loss_fn: LossFn | None, rows: int, n_microbatches: int) -> None:
        if loss_fn is None:
            raise NotExportable("torch's runtime needs a loss: compile with loss_fn=")
        self._program, self._loss_fn, self._rows = program, loss_fn, rows
        stated = find_reduction(loss_fn)
        self._several = n_microbatches > 1
        self._meaning = LossMeaning(loss_fn, stated, watch=CallWatch, find_counts=find_loss_counts)
        # A mean over rows, unless loss_fn states that it is a sum. If it states nothing, its first call shows its
        # meaning.
        self.scale = float(weigh_rows(stated, [rows] * n_microbatches)[0])
        self._sums = stated == "sum"
        self._divisor: float | None = None

    def __call__(self, outputs: Any, target: Any) -> Tensor:
        """Return the scaled loss of one microbatch."""
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        if self._several:
            self._check(values, target)
        return self._loss_fn(self._program.build_result(values), target) * self.scale

    def _check(self, values: Sequence[Any], target: Any) -> None:
        """Raise InputError for a loss that does not follow from microbatches of equal weights."""
        if self._meaning.steps_left:
            self._meaning.look_at(self._program, [v.detach() for v in values], (target,), self._rows)
            self._meaning.end_step()
        if self._meaning.reduction == "sum" and not self._sums:
            raise InputError("loss_fn sums over rows, and does not say so: set loss_fn.reduction = 'sum'")
        count = self._meaning.count
        find = getattr(count, "find_divisor", None)
        if find is None:
            return
        divisor = find([target], self._rows)
        self._divisor = divisor if self._divisor is None else self._divisor
        if divisor != self._divisor:
            raise InputError(
                f"loss_fn divides by a count (ignore_index, class weights), {self._divisor:g} for one microbatch and "
                f"{divisor:g} for another, and torch's runtime weighs all alike: give a loss with reduction='sum'"
            )


def _find_ends(stages: Stages, tensors: Sequence[Tensor]) -> list[StageTensors]:
    """Return the inputs and outputs of each stage, as tensors without values."""
    from fxsplit.torch_internals.torch_pipelining import StageTensors

    # On shapes only: nothing is computed, and weights of other ranks need no memory.
    values = record_values([stage.module for stage in stages.stages], tensors)
    found = []
    for stage, made in zip(stages.stages, values, strict=True):
        places = [made[node] for node in stage.module.graph.find_nodes(op="placeholder")]
        gives = [made[node] for node in list_outputs(stage.module)]
        odd = next((v for v in (*places, *gives) if isinstance(v, Tensor) and v.layout is not torch.strided), None)
        if odd is not None:
            raise NotExportable(f"a {odd.layout} tensor enters or leaves stage {stage.index}: make it dense before")
        takes = [value for value in places if isinstance(value, Tensor)]
        there, back = (tuple(_forget_values(value) for value in side) for side in (takes, gives))
        found.append(StageTensors(there, back, _joins_inputs(stage.module, made)))
    return found


def _joins_inputs(module: fx.GraphModule, made: Mapping[fx.Node, Any]) -> bool:
    """Return whether every output of a stage that has a gradient depends on an input that has one."""
    joined: set[fx.Node] = set()
    for node in module.graph.nodes:
        if _has_gradient(made[node]) and (node.op == "placeholder" or not joined.isdisjoint(node.all_input_nodes)):
            joined.add(node)
    return all(node in joined for node in list_outputs(module) if _has_gradient(made[node]))


def _has_gradient(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(value))


def _forget_values(value: Tensor) -> Tensor:
    """Return a tensor on the meta device with the shape and dtype of another one."""
    empty = torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")
    return empty.requires_grad_(value.requires_grad)


def _check_agreement(compiled: Compiled, group: dist.ProcessGroup | None) -> None:
    """Raise InputError if the ranks of a group have planned different stages, from times that each measured itself."""
    program, plan = compiled.program, compiled.program.plan
    texts = [str(compiled.captured[Example]), plan.schedule, str(plan.n_microbatches), str(program.homes)]
    for stage in program.stages.stages:
        weights = (*stage.module.named_parameters(), *stage.module.named_buffers())
        texts += [stage.code, *(f"{path} {describe_tensor(weight)}" for path, weight in weights)]
    digest = hashlib.sha256("\n".join(texts).encode()).digest()
    device = program.devices[min(dist.get_rank(group), len(program.machine) - 1)]
    own = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    odd = next((rank for rank, one in enumerate(found) if not torch.equal(one, found[0])), None)
    if odd is not None:
        raise InputError(
            f"rank {odd} has other stages than rank 0, as each has measured times of its own: compile for "
            "\"world\", or give all of them one profile, costs='net.json'"
        )
