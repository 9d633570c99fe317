"""compile(): return a model as a pipeline over devices."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from fxsplit import passes as standard
from fxsplit.api.companions import warn_of_untried
from fxsplit.api.compiler.chain import find_schedule_of, state_in_chain
from fxsplit.api.compiler.compile_group import GradientHook, make_compile_group
from fxsplit.api.compiler.compiler import Compiler, get_mode
from fxsplit.api.compiler.devices import Devices, read_devices
from fxsplit.api.compiler.microbatch_count import AUTO
from fxsplit.api.compiler.options import CompileOptions, load_costs
from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.errors import InputError
from fxsplit.formats.weights.safetensors_files import WeightFiles
from fxsplit.ir.chain import Chain, to_chain
from fxsplit.ir.facts.capture.call import parse_example_inputs
from fxsplit.ir.facts.capture.chunks import Chunks
from fxsplit.ir.facts.costs.compress import Compress
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.split import Split
from fxsplit.ir.graph import Pass
from fxsplit.ir.manager import Observer
from fxsplit.runtime.loss.loss import LossFn
from fxsplit.runtime.stage.recompute import Policy
from fxsplit.schedule import Schedule
from fxsplit.schedule.generators.catalogue import ASYNCHRONOUS, RUNNABLE, ScheduleName
from fxsplit.schedule.torch_csv import read_schedule
from fxsplit.system.figures import show
from fxsplit.system.interrupts import lose_no_interrupt
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals.torch_compile.compiled_code import unwrap_compiled

DEFAULT = Chain(standard.DEFAULT)
"""The chain that compile() runs: profile, augment, order, partition, emit, batch-norm."""


@lose_no_interrupt
def compile(
    model: nn.Module,
    devices: Devices,
    *,
    example_inputs: Any = None,
    n_microbatches: int | Literal["auto"] | None = None,
    schedule: ScheduleName | Literal["auto"] | Schedule | os.PathLike[str] | None = None,
    stages_per_device: int | None = None,
    loss_fn: LossFn | None = None,
    recompute: Policy = "plan",
    deferred_batch_norm: bool = False,
    stage_backend: str | None = None,
    inference: bool = False,
    best: bool = False,
    chunks: Chunks | None = None,
    weights: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    passes: str | Chain | Iterable[Pass] = DEFAULT,
    costs: Costs | str | os.PathLike[str] | None = None,
    compress: Compress | None = None,
    gradient_hook: GradientHook | None = None,
    bucket_bytes: float | None = None,
    dump: str | os.PathLike[str] | None = None,
    plan: Plan | Split | str | os.PathLike[str] | None = None,
    pins: Mapping[str, int] | None = None,
    together: Sequence[Sequence[str]] = (),
    observers: Sequence[Observer] = (),
    check_rewrites: bool = True,
    reproducer: str | os.PathLike[str] | None = None,
) -> Pipeline:
    """Return `model` as a pipeline over `devices`: a module that is called, trained and saved like the model.

    model: a module. If the module or its forward() is under torch.compile, the module inside is compiled, with its own
        names of weights.
    devices: names or torch.devices with repeats allowed, a Machine with memory, speed and links, or a number. 2 means
        two GPUs if there are two. With one GPU it means `["cuda:0", "cuda:0"]` if the model or torch's default device
        is on it, and two CPU devices otherwise; a warning says which. Without a GPU it means two CPU devices. "world"
        means one device for each rank under torchrun, and otherwise all GPUs here, or two CPU devices; a DeviceMesh of
        one dimension means its ranks.
    example_inputs: one whole batch as the model would be called: a tensor, a tuple of positional arguments, or a dict
        of keyword arguments. Without it the pipeline compiles on its first call.
    n_microbatches: pieces each batch is cut into (default: one or two a device, depending on the batch), or "auto".
    schedule: "1F1B", "GPipe", "LoopedBFS", "Interleaved1F1B", "ZB-H1", "ZB-H2", "InterleavedZeroBubble",
        "ZBVZeroBubble", "V-Half", "V-Min", "DualPipeV" or "Chimera", used by `step`; "PipeDream" or "PipeDream-2BW",
        in which the optimizer steps between microbatches; or "auto". "auto" measures, plans and simulates every choice,
        and takes the fastest that fits in memory. "search" plans for 1F1B, and then searches for the order of work with
        the shortest step within each device's memory. A Schedule, or the path of a .csv file in torch's format, is run
        as it is. By default the stages are planned for 1F1B, and the schedule is the one among 1F1B, GPipe, ZB-H1,
        ZB-H2 and a searched one with the shortest simulated step that fits in memory; with `plan` it is the plan's.
    stages_per_device: for schedules that take several (default: the number that the schedule is made for).
    loss_fn: loss_fn(outputs, target) -> scalar, for `step`.
    recompute: when a stage keeps no activations and runs forward again before its backward: "never", "always",
        "except_last" (for all microbatches but the last), or "plan" (the default: as partition{recompute=} chooses).
        Plans count the memory and the time; "except_last" counts as "never", which needs at least as much memory.
    deferred_batch_norm: update running statistics once a batch, from the whole batch, and not once a microbatch. A
        warning says so if no stage calls a torch.nn.BatchNorm.
    stage_backend: a backend of torch.compile that compiles each stage, such as "inductor" (default: stages run as they
        are). Costs are measured without it. Backends that record CUDA graphs are refused.
    inference: plan for outputs without gradients, from forward times only, and hold each weight once: no gradients, no
        optimizer state, no activations. A first call or a compile under `torch.no_grad()` or `torch.inference_mode()`
        plans in the same way; the first call that needs gradients then plans again, for training. With True no call
        plans again, and step() is refused.
    best: choose stages, their replicas, the devices in use, the order of work and the number of microbatches together,
        for the shortest step. Up to four numbers of microbatches are measured, for the first batch or the example, and
        the plan says how far it may be from the shortest step for all of these numbers. `schedule`, `n_microbatches`
        and `recompute` stay as they are stated. With `costs`, the number of microbatches is the default. Devices must
        be equal. A batch of another size than the example's keeps the stages.
    chunks: argument (or part of one) -> the dimension that holds its batch, or fxsplit.Replicate if all microbatches
        share it. For other arguments it is the first dimension, if that is as long as the batch.
    weights: a safetensors checkpoint of the model (a file, an index of several, or their folder), whose tensors are
        read one by one to the device of their stage. The model may be on the meta device, built inside
        `fxsplit.without_weights()`: then it is captured and measured by its shapes, one operator at a time. A tensor
        that the model does not have is left out, with a warning if the model does not say to ignore it.
    dtype: the dtype of the model's weights, such as torch.float32: tensors of the checkpoint that have another
        floating-point dtype are converted to it as they are read (default: they are refused).
    passes: the chain, as a Chain, a list, or text such as "profile{repeats=3},augment,order,partition,emit".
    costs: a saved profile (or its path) to plan from in place of measuring.
    compress: send values and gradients between devices in fewer bytes: "bf16", or "int8" with a scale for each row
        (default: as they are). This changes the results: `fxsplit.verify` says by how much.
    gradient_hook: over ranks, how the gradients of pipelines side by side, and of a stage's replicas, are added:
        "allreduce", "fp16", "bf16", "powersgd", "topk" or "sketch", with options as in "topk{share=0.05}", or (state,
        hook) as torch's DDP takes it; a state of None becomes the process group. All but "allreduce" change the
        results: `fxsplit.verify` says by how much.
    bucket_bytes: over ranks, how many bytes of gradients are added at a time (default: 25e6).
    dump: a folder for the IR's text before the first and after every pass (also FXSPLIT_DUMP).
    plan: the stages, in place of a search: a Plan, the path of one from `fxsplit plan --json`, or a split by hand, as
        `Plan.of` takes it, such as `fxsplit.cut_before("layer3")`. Its figures are those of the costs measured here. A
        plan with an order of work of its own also states the schedule and the number of microbatches.
    pins: submodule or node -> number of its device.
    together: sets of submodules or nodes that no cut may separate.
    observers: they are told of each pass (see fxsplit.Observer).
    check_rewrites: run each graph that a pass of yours makes, and compare it with the graph before.
    reproducer: a file that ends with .ir, or a folder for `fxsplit-repro.ir`: if a pass fails, `fxsplit opt` runs the
        file to the same error (also FXSPLIT_REPRODUCER).

    Raises a child of FxsplitError that names the value at fault and the next step.
    """
    warn_of_untried()
    inner = unwrap_compiled(model)
    if inner is not model and stage_backend is None:
        warn_user(
            f"{type(inner).__name__} is under torch.compile, and a pipeline is made of the module inside: its stages "
            'run as they are unless stage_backend="inductor" compiles each of them'
        )
    model = inner
    machine, world = read_devices(devices, model)
    name, fixed, planned = find_schedule_of(plan) if schedule is None else (*read_schedule(schedule), None)
    options = CompileOptions(
        machine=machine,
        chain=state_in_chain(to_chain(passes, standard.PASSES), plan, pins or {}, together),
        schedule=name,
        fixed=fixed,
        stages_per_device=stages_per_device,
        n_microbatches=_choose_count(n_microbatches, planned, tries=best is True and costs is None),
        loss_fn=loss_fn,
        recompute=recompute,
        deferred_batch_norm=deferred_batch_norm,
        stage_backend=stage_backend,
        inference=inference,
        best=best,
        chunks=chunks,
        costs=load_costs(costs),
        compress=compress,
        gradient_hook=gradient_hook,
        bucket_bytes=bucket_bytes,
        dump=dump,
        observers=tuple(observers),
        check_rewrites=check_rewrites,
        reproducer=reproducer or os.environ.get("FXSPLIT_REPRODUCER"),
        side_by_side=world is not None and len(world.rows) > 1,
    )
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        raise InputError(
            f"dtype={show(dtype)}: give the floating-point dtype of the model's weights, such as torch.float32"
        )
    if dtype is not None and weights is None:
        raise InputError(
            f"dtype={dtype} is for the checkpoint that weights= names: give that too, or convert the model with "
            f"model.to({dtype})"
        )
    # Without an example the first call compiles.
    files = None if weights is None else WeightFiles(weights, dtype)
    pipeline = Pipeline(Compiler(model, options, files, compile_group=make_compile_group(world, options)))
    if example_inputs is not None:
        args, kwargs = parse_example_inputs(example_inputs)
        pipeline.compile_for(*args, **kwargs)
    return pipeline


def _choose_count(
    stated: int | Literal["auto"] | None, planned: int | None, *, tries: bool
) -> int | Literal["auto"] | None:
    """Return the number of microbatches: as stated, else by trying several if `tries`, else that of a stated plan."""
    return stated if stated is not None else "auto" if tries else planned


def list_rough(pipe: Pipeline) -> list[Pass]:
    """Return the passes that change numbers on purpose: those that state a tolerance.

    The list is empty for a pipeline with weights of its own: none of its passes is left out.
    """
    made = pipe.compiler.get_compiled(get_mode(pipe.model))
    detached = made is not None and made.program.detached is not None
    return [] if detached else [step for step in pipe.compiler.options.chain if getattr(step, "tolerance", None)]


def recompile_like(
    pipe: Pipeline,
    model: nn.Module,
    loss_fn: LossFn | None,
    compress: str | None = None,
    gradient_hook: GradientHook | None = None,
    *,
    approximate: bool = False,
) -> Pipeline:
    """Return a copy of the model, perhaps in other dtypes, as a pipeline with the same options, for a comparison.

    The costs of `pipe` hold for the copy as well, so both have one plan. If `pipe` has none yet, or the copy has
    another graph, the copy's costs are measured.

    Values between stages are not compressed unless `compress` says so, and gradients are added exactly over ranks
    unless `gradient_hook` says otherwise. Passes that state a tolerance are left out unless `approximate` is set.

    Raises InputError for a schedule that changes the weights between microbatches.
    """
    options = pipe.compiler.options
    for scheduler in options.schedulers:
        if scheduler.name in ASYNCHRONOUS:
            raise InputError(f"{scheduler.name} does not train as the model itself does: verify a pipeline with 1F1B")
    # Deferred statistics are those of the whole batch, but the unsplit model runs microbatch by microbatch.
    rough = [] if approximate else list_rough(pipe)
    kept = (step for step in options.chain if not isinstance(step, standard.BatchNorm) and step not in rough)
    chain = Chain(tuple(replace(step, compress="") if isinstance(step, standard.Cut) else step for step in kept))
    made = pipe.compiler.get_compiled(get_mode(model))
    costs = None if made is None else made.costs
    # The copy runs the schedule that was chosen for the pipeline. A searched one is for one number of microbatches.
    chosen = None if made is None or made.program.plan.schedule_csv else made.program.plan.schedule
    # A search over numbers of microbatches measures each of them, and costs of inference have no backwards.
    if costs is not None and (options.n_microbatches == AUTO or costs.inference):
        costs = None
    options = replace(
        options,
        chain=chain,
        loss_fn=loss_fn,
        costs=costs,
        costs_by_name=costs is not None,
        schedule=chosen if options.schedule is None and chosen in RUNNABLE else options.schedule,
        observed=False,
        deferred_batch_norm=False,
        inference=False,
        compress=compress,
        gradient_hook=gradient_hook,
    )
    return Pipeline(pipe.compiler.recompile_like(model, options))
