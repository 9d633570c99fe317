"""compile(): the one place where the compiler and the runtime meet."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxsplit import passes as standard
from fxsplit.choice import AUTO, Candidate, counts, schedulers, step_ms
from fxsplit.chunks import Chunks
from fxsplit.costs import Costs, KnownCosts
from fxsplit.dependences import keeps_order, together, weights_of
from fxsplit.errors import ChainError, InputError, NoFit, PlanError, TraceError
from fxsplit.inputs import Example, Inputs, as_call
from fxsplit.ir import IR, Fact, Pass, pass_name
from fxsplit.machine import Device, DeviceLike, Machine
from fxsplit.manager import run
from fxsplit.observe import observe, storage_id
from fxsplit.observers import from_environment, progress_bar
from fxsplit.plans import Plan
from fxsplit.runtime import Pipeline, Program
from fxsplit.runtime.batch_norm import check_writes, note
from fxsplit.runtime.checkpoint import check_when
from fxsplit.runtime.loss import LossFn
from fxsplit.runtime.microbatches import default_microbatches, sizes
from fxsplit.runtime.weight_files import WeightFiles
from fxsplit.schedule.catalogue import ASYNCHRONOUS, Scheduler, find_schedule
from fxsplit.schedule.of_plan import replicas_of
from fxsplit.spec import Chain, as_chain
from fxsplit.stages import Stages
from fxsplit.stages import weights as weights_in
from fxsplit.standins import without_values
from fxsplit.trace import capture, same_graph
from fxsplit.workload import Pins, Workload

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
    chain = as_chain(passes, standard.PASSES)
    known = Costs.load(costs) if isinstance(costs, (str, os.PathLike)) else costs
    machine = Machine.of(devices)
    if schedule != AUTO:
        find_schedule(schedule)
    ways = schedulers(schedule, len(machine), stages_per_device)
    stated = n_microbatches if isinstance(n_microbatches, int) else None
    if stated is not None and schedule != AUTO:
        ways[0].schedule(stated)
    check_when(checkpoint)
    if stage_backend is not None and stage_backend not in torch.compiler.list_backends(()):
        backends = ", ".join(torch.compiler.list_backends())
        raise InputError(f"stage_backend={stage_backend!r} is none of torch.compile's: give one of {backends}")
    compiler = _Compiler(
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
        args, kwargs = as_call(example_inputs)
        pipeline.compile_for(*args, **kwargs)
    return pipeline


def alike(pipe: Pipeline, model: nn.Module, loss_fn: LossFn | None) -> Pipeline:
    """Return another model as a pipeline with the same options, to be compared with it; it measures its own costs.

    Raises InputError for a schedule whose weights change between microbatches.
    """
    compiler = pipe.build
    assert isinstance(compiler, _Compiler)
    for scheduler in compiler.schedulers:
        if scheduler.name in ASYNCHRONOUS:
            raise InputError(
                f"{scheduler.name} trains another way than the model by itself: verify a pipeline with 1F1B"
            )
    changed = replace(
        compiler, model=model, costs=None, dump=None, deferred_batch_norm=False, from_shapes=pipe.from_shapes
    )
    return Pipeline(model, changed, compiler.n_microbatches, loss_fn)


@dataclass(frozen=True, eq=False)
class _Compiler:
    """Compiles the model for a call, in whichever mode it is then."""

    model: nn.Module
    machine: Machine
    schedulers: Sequence[Scheduler]
    n_microbatches: int | None
    any_number: bool
    checkpoint: str
    deferred_batch_norm: bool
    stage_backend: str | None
    chunks: Chunks | None
    chain: Chain
    costs: Costs | None
    dump: str | os.PathLike[str] | None
    from_shapes: bool = False

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], other: Program | None) -> Program:
        """Return the program of the model's present mode; it shares the stages of the other mode where it can.

        Where the two modes are different graphs, every parameter stays on the stage it has in the other one.
        """
        inputs, tensors = Inputs.of(self.model, args, kwargs, self.chunks)
        batch = inputs.rows(tensors)
        watchers = from_environment(self._folder(other), [pass_name(p) for p in self.chain])
        # The first call may come under no_grad or inference_mode; what is learnt then must hold for training too.
        with torch.inference_mode(False), torch.enable_grad(), progress_bar():
            chosen, known = self._chosen(args, kwargs, batch, other)
            count = chosen.n_microbatches
            traced = self._captured(args, kwargs, sizes(batch, count)[0], other)
            if other is not None and _serves(other, traced):
                return other
            costs = _KeepCosts()
            alone = False
            try:
                facts = self._facts(chosen, traced, other, known)
                final = run(traced.learn(*facts), self.chain, [costs, *watchers])
            except PlanError:
                if other is None:
                    raise
                # Memory is shared otherwise in this mode, and the weights' places do not suit it: plan anew.
                alone = True
                final = run(traced.learn(*self._facts(chosen, traced, None, known)), self.chain, [costs, *watchers])
        for kind, name in ((Plan, "partition"), (Stages, "emit")):
            if final.get(kind) is None:
                raise ChainError(f"the chain {self.chain} learns no {kind.__name__}: it needs a pass like {name!r}")
        program = Program(
            model=self.model,
            inputs=inputs,
            stages=final[Stages],
            plan=final[Plan],
            costs=costs.found,
            machine=self.machine,
            scheduler=chosen.scheduler,
            n_microbatches=count if self.any_number else None,
            traced=traced,
            final=final,
            alone=alone,
            checkpoint=self.checkpoint,
            stage_backend=self.stage_backend,
        )
        program.schedule(count)  # raises for a plan that the schedule cannot run
        note(program.stages, self._check_replicas(chosen, traced, final), self.deferred_batch_norm)
        return program

    def _captured(self, args: Sequence[Any], kwargs: Mapping[str, Any], rows: int, other: Program | None) -> IR:
        """Return the graph of the model's present mode, for microbatches of so many rows.

        A model that was captured by its shapes is so in its other mode too, unless that needs the weights and has them.
        """
        from_shapes = self.from_shapes or (other is not None and other.traced[Example].from_shapes)
        leaves = [step.path for step in self.chain if isinstance(step, standard.Leaf)]
        try:
            return capture(self.model, args, kwargs, rows, self.chunks, leaves, from_shapes)
        except TraceError:
            together = len({w.device for w in weights_in(self.model)}) == 1
            if not from_shapes or not together or without_values(self.model):
                raise
            return capture(self.model, args, kwargs, rows, self.chunks, leaves)

    def _check_replicas(self, way: Candidate, traced: IR, final: IR) -> list[bool]:
        """Return which stages have several devices; raises PlanError for one that cannot."""
        stages = final[Stages]
        homes = replicas_of(final[Plan]) or way.scheduler.homes(len(stages))
        replicated = [len(home) > 1 for home in homes]
        check_writes(self.model, stages, replicated, traced[Example].updated)
        return replicated

    def _chosen(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], batch: int, other: Program | None
    ) -> tuple[Candidate, Costs | None]:
        """Return the schedule and number of microbatches: the only ones, the other mode's, or the fastest that fit.

        Also returns the costs that were measured on the way.
        """
        if other is not None:
            count = self.n_microbatches or other.n_microbatches or 0
            usual = other.scheduler.nearest(default_microbatches(batch, len(self.machine)))
            return Candidate(other.scheduler, count if 0 < count <= batch else usual), self.costs
        ways = []
        for scheduler in self.schedulers:
            usual = self.n_microbatches or scheduler.nearest(default_microbatches(batch, len(self.machine)))
            numbers = counts(batch, len(self.machine)) if self.any_number else [usual]
            ways += [Candidate(scheduler, n) for n in numbers if n == scheduler.nearest(n)]
        if len(ways) == 1:
            return ways[0], self.costs
        return self._fastest(ways, args, kwargs, batch)

    def _fastest(
        self, ways: Sequence[Candidate], args: Sequence[Any], kwargs: Mapping[str, Any], batch: int
    ) -> tuple[Candidate, Costs | None]:
        """Return the candidate whose step the simulator finds shortest, of those whose plans fit in memory."""
        refused: list[tuple[float, Candidate, PlanError]] = []
        found: list[tuple[float, Candidate, Costs | None]] = []
        for count in sorted({way.n_microbatches for way in ways}):
            traced = self._captured(args, kwargs, sizes(batch, count)[0], None)
            known = self.costs
            for way in (way for way in ways if way.n_microbatches == count):
                costs = _KeepCosts()
                try:
                    final = run(traced.learn(*self._facts(way, traced, None, known)), self.chain, [costs])
                    if final.get(Plan) is not None and final.get(Stages) is not None:
                        self._check_replicas(way, traced, final)
                except PlanError as error:
                    refused.append((getattr(error, "short_bytes", inf), way, error))
                    continue
                known = costs.found or known
                if final.get(Plan) is None:
                    raise ChainError(f"the chain {self.chain} learns no Plan: nothing to choose a schedule by")
                found.append((step_ms(final[Plan], way), way, known))
        if not found:
            tried = ", ".join(str(way) for way in ways)
            short, way, reason = min(refused, key=lambda entry: entry[0])
            raise NoFit(f"none of {tried} fits; nearest is {way}: {reason}", short) from reason
        _, way, known = min(found, key=lambda entry: entry[0])
        return way, known

    def _facts(self, way: Candidate, traced: IR, other: Program | None, known: Costs | None) -> list[Fact]:
        """Return what the chain starts from, besides the graph and its example."""
        machine = self.machine.unrolled(way.scheduler.homes())
        count = way.n_microbatches
        peaks = {k: way.scheduler.in_flight(count, k) for k in range(1, len(machine) + 1)}
        versions = {k: way.scheduler.versions(count, k) for k in peaks if way.scheduler.name in ASYNCHRONOUS}
        workload = Workload(way.scheduler.name, count, peaks, may_idle=other is not None, versions=versions)
        facts: list[Fact] = [machine, workload]
        if other is not None:
            facts += [_pins(traced, other)]
            facts += [] if other.costs is None else [KnownCosts(other.costs, complete=False)]
        elif known is not None:
            facts.append(KnownCosts(known, complete=known is self.costs))
        return facts

    def _folder(self, other: Program | None) -> Path | None:
        """Return where to dump to: a second mode has a folder of its own inside the first's."""
        folder = self.dump or os.environ.get("FXSPLIT_DUMP")
        if not folder:
            return None
        mode = "train" if self.model.training else "eval"
        return Path(folder) / mode if other is not None else Path(folder)


class _KeepCosts:
    """Keeps the costs, which the rewriting into stages forgets."""

    found: Costs | None = None

    def start(self, ir: IR) -> None:
        """Know nothing yet."""

    def after(self, name: str, ir: IR) -> None:
        """Keep the latest costs."""
        self.found = ir.get(Costs) or self.found


def _serves(other: Program, traced: IR) -> bool:
    """Return whether the other mode's stages are right in this mode too.

    The graph may be the same and memory not: what dropout returns is its input in evaluation, and a copy in training.
    """
    here, there = traced[Example], other.traced[Example]
    if here.written > there.written or not set(here.rewritten) <= set(there.rewritten):
        return False
    if not same_graph(traced.gm, other.traced.gm):
        return False
    if other.costs is None:
        return True
    seen = observe(traced.gm, here.tensors, from_shapes=here.from_shapes)
    stage_of = other.plan.stage_of()
    parted = [c for c in together(traced.gm, seen) if len({stage_of.get(name) for name in c}) > 1]
    crossed = [(a, b) for a, b in keeps_order(traced.gm, seen) if stage_of.get(a, 0) > stage_of.get(b, 0)]
    known = {n.name for n in other.costs.nodes if n.draws}
    return not parted and not crossed and all(name in known for name, node in seen.items() if node.draws)


def _pins(traced: IR, other: Program) -> Pins:
    """Return pins that keep every parameter and buffer of the graph on the stage it has in the other mode.

    What several stages share may be anywhere.
    """
    homes: dict[int, set[int]] = {}
    for stage in other.stages.stages:
        for weight in weights_in(stage.module):
            homes.setdefault(storage_id(weight), set()).add(stage.index)
    alone = {storage: next(iter(stages)) for storage, stages in homes.items() if len(stages) == 1}
    pinned = {n.name: alone.get(storage_id(w)) for n in traced.gm.graph.nodes for w in weights_of(traced.gm, n)}
    found = {name: stage for name, stage in pinned.items() if stage is not None}
    return Pins(found, optional=frozenset(found))
