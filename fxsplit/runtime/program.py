"""Program: all that the runtime needs to run one compiled mode of a model; nothing that another process could not take.

It has neither the model nor the graph that it was compiled from. `Batch` is a call of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxsplit.errors import InputError
from fxsplit.ir.facts.capture.call import Inputs
from fxsplit.ir.facts.capture.counts import Count, CountWatch, Weights
from fxsplit.ir.facts.capture.output_kinds import OutputKind
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.stages import Stage, Stages, list_weights
from fxsplit.runtime.deferred_errors import DeferredErrors
from fxsplit.runtime.stage.compiled_stage import Compilations, Compiling
from fxsplit.runtime.stage.recompute import POLICIES, WrittenBuffers
from fxsplit.runtime.stage.replica import Replica
from fxsplit.runtime.stage.shared_modules import ModuleLocks
from fxsplit.schedule import Schedule, verify
from fxsplit.schedule.action import BACKWARD, FORWARD, REDUCE
from fxsplit.schedule.generators.catalogue import INFERENCE, Scheduler
from fxsplit.schedule.generators.synchronous import run_forwards_first
from fxsplit.schedule.of_plan import build_schedule, find_replicas
from fxsplit.schedule.schedule import Homes
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fx.interpret import get_storage_id
from fxsplit.torch_internals.fx.kv_cache import KVCaches
from fxsplit.torch_internals.nn.batch_norm import DeferredBatchNorm
from fxsplit.torch_internals.nn.containers import HOOKS
from fxsplit.torch_internals.nn.optimizer_state import note_move
from fxsplit.torch_internals.nn.recurrent import flatten_weights
from fxsplit.torch_internals.random.seeded_calls import SeededCall
from fxsplit.torch_internals.tensors import accelerators

ELSEWHERE = torch.device("meta")
"""Where weights are said to live that are of another process; no stage runs there."""


@dataclass(frozen=True, eq=False)
class Program:
    """Stages with their plan and machine, and how a batch goes in and comes out.

    inputs: how the model is called, and on which dimension each tensor is cut into microbatches.
    returns: the model's own containers for its outputs (None: plain tuples, lists and dicts).
    joined: for each output of the last stage, what that of the batch is in terms of those of its microbatches.
    writes_inputs: whether the graph writes to its inputs in place.
    rewritten: buffers, as (stage, path in the stage's module), that every call writes and autograd may save.
    puts_hooks: whether modules put hooks on activations as they run.
    recompute: when a stage keeps no activations, a key of `POLICIES`.
    compiling: how torch.compile compiles each stage (None: stages run as they are).
    detached: why no gradient of the stages reaches the model (None: every gradient does).
    here: the devices that run in this process (None: all of them); other processes run the others.
    fingerprint: what processes compare that run one program together.
    living: by (stage, number among its weights), the stage that a weight lives with, where that is not the first one
        that has it: other programs of the model have it there.
    sums_apart: whether gradients of replicas are added when the schedule is over, and not by it.
    """

    stages: Stages
    plan: Plan
    machine: Machine
    scheduler: Scheduler
    inputs: Inputs
    returns: pytree.TreeSpec | None
    joined: tuple[OutputKind, ...]
    writes_inputs: bool
    rewritten: tuple[tuple[int, str], ...]
    puts_hooks: bool
    recompute: str = "plan"
    compiling: Compiling | None = None
    detached: str | None = None
    here: frozenset[int] | None = None
    fingerprint: str = ""
    sums_apart: bool = False
    living: Mapping[tuple[int, int], int] = field(default_factory=dict)
    # Values of weights that live in other processes, by the id of the model's own; brought here before each batch.
    fetched: dict[int, Tensor] = field(default_factory=dict, init=False)
    # Learnt as batches run. Buffers that a recomputing stage writes are told apart by its first run.
    written: defaultdict[int, WrittenBuffers] = field(default_factory=partial(defaultdict, WrittenBuffers), init=False)
    deferred_errors: DeferredErrors = field(default_factory=DeferredErrors, init=False)
    _schedules: dict[int, Schedule] = field(default_factory=dict, init=False)
    _passes: dict[int, tuple[Schedule, Schedule]] = field(default_factory=dict, init=False)

    def schedule(self, n_microbatches: int) -> Schedule:
        """Return the schedule of a training step for a number of microbatches, verified.

        Raises ScheduleError for a number that the schedule is not made for.
        """
        if n_microbatches not in self._schedules:
            # Replicas hold as many microbatches as keep all of them busy, or as their memory takes.
            memory_bytes = [device.memory_bytes for device in self.machine.devices]
            schedule = build_schedule(self.plan, self.scheduler, n_microbatches, memory_bytes)
            verify(schedule)
            self._schedules[n_microbatches] = schedule.without(REDUCE) if self.sums_apart else schedule
        return self._schedules[n_microbatches]

    def pass_forward(self, n_microbatches: int) -> Schedule:
        """Return all forwards of a batch, for when something else comes before its backwards; any number will do."""
        return self._make_passes(n_microbatches)[0]

    def pass_backward(self, n_microbatches: int) -> Schedule:
        """Return all backwards of a batch, whose forwards have been run."""
        return self._make_passes(n_microbatches)[1]

    def _make_passes(self, n_microbatches: int) -> tuple[Schedule, Schedule]:
        if n_microbatches not in self._passes:
            made = Schedule("passes", n_microbatches, self.homes, run_forwards_first(self.homes, n_microbatches))
            self._passes[n_microbatches] = made.only(FORWARD), made.only(BACKWARD)
        return self._passes[n_microbatches]

    @property
    def inference(self) -> bool:
        """Whether the plan is for outputs without gradients alone."""
        return self.scheduler.name == INFERENCE

    def recomputes(self, stage: int, microbatch: int, n_microbatches: int) -> bool:
        """Return whether a stage keeps no activations of a microbatch, and runs forward again before its backward."""
        return POLICIES[self.recompute](self.plan.stages[stage].recompute, microbatch, n_microbatches)

    @cached_property
    def homes(self) -> Homes:
        """The devices of each stage."""
        return find_replicas(self.plan) or self.scheduler.homes(len(self.stages))

    @cached_property
    def replicas(self) -> list[list[Replica]]:
        """Each stage as each of its devices runs it."""
        devices, places = self.machine.devices, self.places
        return [
            [
                # Of a stage elsewhere nothing is copied, and nothing compiled: it is there to be named.
                Replica(stage, devices[d], places, self.compilations, self.fetched)
                if self.runs(d)
                else Replica(stage, devices[d], {})
                for d in home
            ]
            for stage, home in zip(self.stages.stages, self.homes, strict=True)
        ]

    def runs(self, device: int) -> bool:
        """Return whether a device of the schedule runs in this process."""
        return self.here is None or device in self.here

    @cached_property
    def stages_here(self) -> tuple[Stage, ...]:
        """The stages that some device of this process has."""
        pairs = zip(self.stages.stages, self.homes, strict=True)
        return tuple(stage for stage, home in pairs if any(map(self.runs, home)))

    @cached_property
    def copies_weights(self) -> bool:
        """Whether some stage reads copies of weights that live elsewhere."""
        return any(replica.copies for replicas in self.replicas for replica in replicas)

    def has_stale_copies(self) -> bool:
        """Return whether a copy of a weight is not what the model is now, as far as torch counts writes."""
        return any(replica.is_stale() for replicas in self.replicas for replica in replicas)

    @cached_property
    def compilations(self) -> Compilations | None:
        """The stages as torch.compile makes them, where that was asked for."""
        return None if self.compiling is None else Compilations(self.compiling)

    def tell_compilations(self) -> None:
        """Warn of what torch.compile had to compile again."""
        if self.compilations is not None:
            self.compilations.tell()

    @property
    def places(self) -> dict[int, torch.device]:
        """Where each parameter and buffer lives, by its identity: with the first stage that has it.

        Those of other processes are said to live on `ELSEWHERE`.
        """
        here = {id(weight): device for weight, device in self.list_placed()}
        return {key: here.get(key, ELSEWHERE) for key in self.list_owners()}

    def list_owners(self) -> dict[int, tuple[Tensor, Stage]]:
        """Return each parameter and buffer with the stage that it lives with, stage by stage, by its identity.

        That is the first stage that has it, unless other programs of the model have it elsewhere.
        """
        # A weight that two stages read has one home; stages on other devices run with copies (see Replica).
        found: dict[int, tuple[Tensor, Stage]] = {}
        for stage in self.stages.stages:
            for number, weight in enumerate(list_weights(stage.module)):
                home = self.living.get((stage.index, number), stage.index)
                found.setdefault(id(weight), (weight, self.stages[home]))
        return found

    def live_with(self, others: Sequence[Program]) -> Program:
        """Return the same program with each weight on the stage where the first of `others` that has it has it."""
        known: dict[int, int] = {}
        for program in others:
            for key, (_, stage) in program.list_owners().items():
                known.setdefault(key, stage.index)
        held = [(stage.index, *pair) for stage in self.stages.stages for pair in enumerate(list_weights(stage.module))]
        living = {(stage, number): known[id(w)] for stage, number, w in held if known.get(id(w), stage) != stage}
        return replace(self, living=living) if living else self

    def list_placed(self) -> list[tuple[Tensor, torch.device]]:
        """Return each parameter and buffer of this process with the device it belongs on, stage by stage."""
        owners = self.list_owners().values()
        return [(weight, s.torch_device) for weight, s in owners if self.runs(self.homes[s.index][0])]

    def place_weights(self) -> None:
        """Move each stage's parameters and buffers to its device, in place: optimizers keep holding them.

        Their gradients move with them, and so does what optimizers know of them, before their next step. Those that
        have no values yet stay where they are.
        """
        for weight, device in self.list_placed():
            before = weight.device
            if before == device or weight.is_meta:
                continue
            # `.data` keeps the parameter the same object, which optimizers and the model hold.
            weight.data = weight.data.to(device)
            if isinstance(weight, nn.Parameter):
                note_move(weight, before)
            # A gradient, too: a program may hold it.
            if weight.grad is not None:
                weight.grad.data = weight.grad.data.to(device)
        for stage in self.stages_here:
            flatten_weights(stage.module.modules())

    def list_counted(self) -> dict[str, Tensor]:
        """Return the buffers that counts of outputs read, such as weights of classes, by names alike on all ranks."""
        counts = [meaning.count for meaning in self.joined if meaning.count is not None]
        whole = [one for count in counts for one in (count.counts if isinstance(count, CountWatch) else [count])]
        held = [list(c.compute.named_buffers()) if isinstance(c.compute, nn.Module) else [] for c in whole]
        return {f"{i} {name}": buffer for i, named in enumerate(held) for name, buffer in named}

    @cached_property
    def keeps_zeros(self) -> bool:
        """Whether a microbatch may weigh nothing without the host knowing it, and its backward divides by zero then."""
        counts = [meaning.count for meaning in self.joined if isinstance(meaning.count, Count)]
        there = any(map(accelerators.is_accelerator, self.machine.torch_devices()))
        return there and any(not count.safe for count in counts)

    @cached_property
    def shares_parameters(self) -> bool:
        """Whether two stages have one parameter."""
        held = [id(p) for stage in self.stages.stages for p in stage.module.parameters()]
        return len(set(held)) < len(held)

    @cached_property
    def shares_leaves(self) -> bool:
        """Whether two workers on one device may run backward to one leaf: of stages that share it, or of replicas."""
        devices = self.machine.torch_devices()
        return self.shares_parameters or any(len({devices[d] for d in home}) < len(home) for home in self.homes)

    def check_joinable(self, n_microbatches: int) -> None:
        """Raise InputError where the outputs of so many microbatches do not make those of the batch."""
        lost = next((meaning for meaning in self.joined if meaning.kind == "unjoined"), None)
        if n_microbatches > 1 and lost is not None:
            raise InputError(lost.why)

    def build_result(self, outputs: Sequence[Any]) -> Any:
        """Return the last stage's outputs in the containers that the model returns."""
        # torch.fx returns plain containers, and a model may return its own, such as an OrderedDict.
        plain = self.stages.fill(outputs)
        return plain if self.returns is None else pytree.tree_unflatten(pytree.tree_leaves(plain), self.returns)

    def find_rewritten_memory(self) -> frozenset[int]:
        """Return the memory, as it is now, of the buffers that each call writes and autograd may save for backward."""
        # Buffers may have moved, or been replaced by load_state_dict(assign=True), since the last batch.
        here = {stage.index for stage in self.stages_here}
        buffers = (self.stages[s].module.get_buffer(path) for s, path in self.rewritten if s in here)
        return frozenset(map(get_storage_id, buffers))

    @cached_property
    def turns(self) -> ModuleLocks:
        """Where threads must take turns, as they run one module that sets attributes."""
        return ModuleLocks([[replica.stage.module for replica in replicas] for replicas in self.replicas])

    @cached_property
    def noted(self) -> list[DeferredBatchNorm]:
        """The batch norms whose running statistics change at the end of a batch."""
        return [m for s in self.stages_here for m in s.module.children() if isinstance(m, DeferredBatchNorm)]

    def find_hooked_stages(self) -> list[bool]:
        """Return, for each stage, whether its modules have hooks now, or put hooks on activations."""
        # Asked for every job: hooks may be registered and removed between calls.
        return [
            self.puts_hooks or any(state.get(kind) for state in map(vars, modules) for kind in HOOKS)
            for modules in self._modules
        ]

    def draws(self) -> bool:
        """Return whether any stage takes random numbers in the mode that its modules are in now."""
        # Not kept: the same program may serve training, where dropout draws, and evaluation.
        return any(isinstance(m, SeededCall) and not m.idle for s in self.stages.stages for m in s.module.children())

    @cached_property
    def _modules(self) -> list[list[nn.Module]]:
        """The modules of each stage; a model whose modules were replaced is compiled again."""
        # To find all modules takes longer than to look at all weights, and is asked for at every call.
        return [list(s.module.modules()) for s in self.stages.stages]

    @cached_property
    def weight_dicts(self) -> list[list[Mapping[str, Tensor | None]]]:
        """For each stage, the dictionaries in which its modules hold their parameters, and then those of buffers.

        Of a stage that no device of this process has, there are none.
        """
        here = {stage.index for stage in self.stages_here}
        return [
            [m._parameters for m in modules] + [m._buffers for m in modules] if i in here else []
            for i, modules in enumerate(self._modules)
        ]

    def list_flags(self) -> tuple[bool, ...]:
        """Return which weights want a gradient now, of all stages, those of other processes among them."""
        return tuple([w.requires_grad for held in self._parameters for w in held.values() if w is not None])

    @cached_property
    def _parameters(self) -> list[Mapping[str, Tensor | None]]:
        """The dictionaries in which the modules of all stages hold their parameters."""
        return [m._parameters for modules in self._modules for m in modules if m._parameters]

    def list_trained(self) -> list[list[Tensor]]:
        """Return, for each stage, its leaves that want a gradient now; a frozen parameter may be thawed later.

        Of a stage that no device of this process has, there are none.
        """
        weights = [[w for held in dicts for w in held.values() if w is not None] for dicts in self.weight_dicts]
        # Each once: by identity, since a tensor is looked up in a set by a function of Python's.
        return [list({id(w): w for w in held if w.requires_grad}.values()) for held in weights]


class Batch(NamedTuple):
    """A call that is ready to run: the program, the tensors among its arguments, and the rows of each microbatch.

    `numbers` are Python numbers that are inputs of the graph too; every microbatch gets them. `kv_caches` are what
    stages keep of each microbatch from call to call: keys and values of attention (None: nothing).
    """

    program: Program
    tensors: Sequence[Tensor]
    rows: Sequence[int]
    numbers: tuple[float, ...] = ()
    kv_caches: KVCaches | None = None

    def weigh(self, meaning: OutputKind, first: int = 0, last: int | None = None) -> Weights:
        """Return the weight of each microbatch, from `first` up to `last`, in what these make."""
        rows = self.rows[first:last]
        if meaning.count is None:
            return meaning.list_weights(rows)
        weigh = meaning.count.weigh_there if isinstance(meaning.count, Count) else meaning.count.weigh
        pieces, whole = self.cut_for_counts(rows, sum(self.rows[:first]))
        return weigh(pieces, rows, whole)

    def cut_for_counts(self, rows: Sequence[int], before: int = 0) -> tuple[list[list[Any]], list[Any]]:
        """Return what counts read of pieces of so many rows, which lie behind those `before`, and of all of them."""
        cuts = [spec.cut for spec in self.program.inputs.specs]
        whole = [cut.narrow(t.detach(), before, sum(rows)) for cut, t in zip(cuts, self.tensors, strict=True)]
        columns = [cut.split(t, rows) for cut, t in zip(cuts, whole, strict=True)]
        return [[*piece, *self.numbers] for piece in zip(*columns, strict=True)], [*whole, *self.numbers]

    def weigh_outputs(self) -> list[OutputKind]:
        """Return what each output of the program means, with the weights of this batch's microbatches."""
        return [m if m.count is None else replace(m, weights=self.weigh(m)) for m in self.program.joined]
