"""compile(): return a model as a pipeline over devices."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxsplit import passes as standard
from fxsplit.api.auto import AUTO, list_schedulers
from fxsplit.api.compiler import Compiler
from fxsplit.api.pipeline import Pipeline
from fxsplit.errors import InputError
from fxsplit.formats.safetensors_files import WeightFiles
from fxsplit.ir.chain import Chain, to_chain
from fxsplit.ir.facts.call import parse_example_inputs
from fxsplit.ir.facts.chunks import Chunks
from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.machine import Device, DeviceLike, Machine
from fxsplit.ir.graph import Pass
from fxsplit.runtime.loss import LossFn
from fxsplit.runtime.stage.recompute import check_policy
from fxsplit.schedule.catalogue import ASYNCHRONOUS, find_schedule

DEFAULT = Chain(standard.DEFAULT)
"""The chain that compile() runs: profile, augment, order, partition, emit."""


def compile(
    model: nn.Module,
    devices: int | DeviceLike | Sequence[DeviceLike | Device] | Machine,
    *,
    example_inputs: Any = None,
    n_microbatches: int | str | None = None,
    schedule: str = "1F1B",
    stages_per_device: int | None = None,
    loss_fn: LossFn | None = None,
    checkpoint: str = "plan",
    deferred_batch_norm: bool = False,
    stage_backend: str | None = None,
    chunks: Chunks | None = None,
    weights: str | os.PathLike[str] | None = None,
    passes: str | Chain | Iterable[Pass] = DEFAULT,
    costs: Costs | str | os.PathLike[str] | None = None,
    dump: str | os.PathLike[str] | None = None,
) -> Pipeline:
    """Return `model` as a pipeline over `devices`: a module that is called, trained and saved like the model.

    devices: a number (that many GPUs where there are as many, CPU devices otherwise), names or torch.devices with
        repeats allowed, or a Machine with memory, speed and links.
    example_inputs: one whole batch as the model would be called: a tensor, a tuple of positional arguments, or a
        dict of keyword arguments. Without it the pipeline compiles on its first call.
    n_microbatches: pieces each batch is cut into (default: one or two a device, depending on the batch), or "auto".
    schedule: "1F1B", "GPipe", "LoopedBFS", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble" or "Chimera", used by `step`;
        "PipeDream" or "PipeDream-2BW", in which the optimizer steps between microbatches; or "auto". What is "auto" is
        measured, planned and simulated in every way that fits in memory, and the fastest is taken.
    stages_per_device: for schedules that take several (default: what the schedule is made for).
    loss_fn: loss_fn(outputs, target) -> scalar, for `step`.
    checkpoint: when a stage keeps no activations and runs forward again before its backward: "never", "always",
        "except_last" (for all microbatches but the last), or "plan" (where partition{recompute=} says so).
    deferred_batch_norm: let running statistics change once a batch, by all of it, and not by each microbatch.
    stage_backend: what torch.compile compiles each stage with, such as "inductor" (default: stages run as they are).
        Costs are measured without it.
    chunks: argument (or part of one) -> the dimension that holds its batch, or fxsplit.Replicate where all microbatches
        share it. What is not stated is found: the first dimension where that is as long as the batch.
    weights: a safetensors checkpoint of the model (a file, an index of several, or their folder), whose tensors are
        read one by one to the device of their stage. The model may be on the meta device, built inside
        `fxsplit.without_weights()`: then it is captured and measured by its shapes, one operator at a time.
    passes: the chain, as a Chain, a list, or text such as "profile{repeats=3},augment,order,partition,emit".
    costs: a saved profile (or its path) to plan from in place of measuring.
    dump: a folder for the IR's text before the first and after every pass (also FXSPLIT_DUMP).

    Raises a child of FxsplitError that names the value at fault and the next step.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    if not (n_microbatches in (None, AUTO) or (type(n_microbatches) is int and n_microbatches >= 1)):
        raise InputError(f"n_microbatches={n_microbatches!r}: give a number of at least 1, 'auto', or leave it out")
    if n_microbatches == AUTO and costs is not None:
        raise InputError("n_microbatches='auto' measures microbatches of every size: leave costs= out")
    if loss_fn is not None and (not callable(loss_fn) or isinstance(loss_fn, type)):
        raise InputError(f"loss_fn={loss_fn!r} is no function or module: give loss_fn(outputs, target) -> scalar")
    if isinstance(model, Pipeline):
        raise InputError("model is a pipeline already: compile the model it was made from")
    if not (costs is None or isinstance(costs, (Costs, str, os.PathLike))):
        raise InputError(f"costs={costs!r}: give a profile (pipe.costs), or the path of a saved one")
    if not (dump is None or isinstance(dump, (str, os.PathLike))):
        raise InputError(f"dump={dump!r}: give the path of a folder")
    chain = to_chain(passes, standard.PASSES)
    known = Costs.load(costs) if isinstance(costs, (str, os.PathLike)) else costs
    machine = Machine.of(devices)
    if schedule != AUTO:
        find_schedule(schedule)
    ways = list_schedulers(schedule, len(machine), stages_per_device)
    stated = n_microbatches if isinstance(n_microbatches, int) else None
    if stated is not None and schedule != AUTO:
        ways[0].schedule(stated)
    check_policy(checkpoint)
    if stage_backend is not None and stage_backend not in torch.compiler.list_backends(()):
        backends = ", ".join(torch.compiler.list_backends())
        raise InputError(f"stage_backend={stage_backend!r} is none of torch.compile's: give one of {backends}")
    compiler = Compiler(
        model=model,
        machine=machine,
        schedulers=ways,
        n_microbatches=stated,
        any_number=n_microbatches == AUTO,
        checkpoint=checkpoint,
        deferred_batch_norm=deferred_batch_norm,
        stage_backend=stage_backend,
        chunks=chunks,
        chain=chain,
        costs=known,
        dump=dump,
    )
    files = None if weights is None else WeightFiles(weights)
    pipeline = Pipeline(model, compiler, stated, loss_fn, files)
    if example_inputs is not None:
        args, kwargs = parse_example_inputs(example_inputs)
        pipeline.compile_for(*args, **kwargs)
    return pipeline


def recompile_like(pipe: Pipeline, model: nn.Module, loss_fn: LossFn | None) -> Pipeline:
    """Return another model as a pipeline with the same options, to be compared with it; it measures its own costs.

    Raises InputError for a schedule whose weights change between microbatches.
    """
    compiler = pipe.build
    assert isinstance(compiler, Compiler)
    for scheduler in compiler.schedulers:
        if scheduler.name in ASYNCHRONOUS:
            raise InputError(
                f"{scheduler.name} trains another way than the model by itself: verify a pipeline with 1F1B"
            )
    changed = replace(
        compiler, model=model, costs=None, dump=None, deferred_batch_norm=False, from_shapes=pipe.from_shapes
    )
    return Pipeline(model, changed, compiler.n_microbatches, loss_fn)
