"""A program: all that the runtime needs to run a model compiled for one mode (training or evaluation).

A program holds neither the model nor the graph that it was compiled from. A `Batch` is one call of a program.
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
from fxsplit.torch_internals.tensors.accelerators import is_on_host
from fxsplit.torch_internals.tensors.host_copies import PendingCopies

ELSEWHERE = torch.device("meta")
"""The device that is reported for a weight of another process. No stage runs there."""


class DeferredErrors:
    """Errors that only an accelerator can detect: raised in a later batch, so that no batch waits for the device."""

    def __init__(self) -> None:
        self._coming: PendingCopies[str] = PendingCopies()

    def expect(self, wrong: Tensor, message: str) -> None:
        """Raise InputError with `message` if the flag `wrong` is set.

        A flag on the host raises at once. A flag on an accelerator raises in a later batch.
        """
        if is_on_host(wrong):
            if wrong:
                raise InputError(message)
        # If too many flags are on their way, this check is skipped.
        elif not self._coming.is_full:
            self._coming.add(wrong, message)

    def raise_arrived(self) -> None:
        """Raise InputError if a flag of an earlier batch has reached the host and is set.

        This never waits for a flag.
        """
        for wrong, message in self._coming.take_arrived():
            if wrong:
                raise InputError(f"in an earlier batch, which the accelerator has computed by now: {message}")


@dataclass(frozen=True, eq=False)
class Program:
    """The stages of a compiled model with their plan and machine, and how a batch is cut and joined.

    The program owns what is fixed between batches:

    - the replicas of the stages, on their devices, and the copies of weights that they hold
    - the schedules, by number of microbatches
    - the errors that an accelerator may still report

    Its fields:
    inputs: the model's call, and the dimension on which each tensor is cut into microbatches.
    returns: the model's own containers for its outputs (None: plain tuples, lists and dicts).
    joined: for each output of the last stage, how the batch's output follows from the microbatches' outputs.
    writes_inputs: whether the graph writes to its inputs in place.
    rewritten: buffers, as (stage, path in the stage's module), that every call writes and autograd may save.
    puts_hooks: whether modules register hooks on activations as they run.
    recompute: which stages keep no activations and run their forward again; a key of `POLICIES`.
    compiling: how torch.compile compiles each stage (None: stages run as they are).
    detached: why no gradient of the stages reaches the model (None: every gradient does).
    here: the devices that run in this process (None: all of them); other processes run the rest.
    fingerprint: a digest that processes compare before they run one program together.
    living: for some weights, as (stage, index among the stage's weights), the stage that the weight lives with. All
        other weights live with the first stage that has them.
    sums_apart: whether gradients of replicas are added after the schedule, and not by its actions.
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
    # Values of weights of other processes, by the id of the model's own tensor. They are fetched before each batch.
    fetched: dict[int, Tensor] = field(default_factory=dict, init=False)
    # Learnt as batches run: a stage's first run shows which buffers it writes, for recomputation.
    written: defaultdict[int, WrittenBuffers] = field(default_factory=partial(defaultdict, WrittenBuffers), init=False)
    deferred_errors: DeferredErrors = field(default_factory=DeferredErrors, init=False)
    _schedules: dict[int, Schedule] = field(default_factory=dict, init=False)
    _passes: dict[int, tuple[Schedule, Schedule]] = field(default_factory=dict, init=False)

    def schedule(self, n_microbatches: int) -> Schedule:
        """Return the schedule of a training step with `n_microbatches` microbatches.

        The schedule has passed the verifier.
        Raises ScheduleError if the schedule cannot have that number of microbatches.
        """
        if n_microbatches not in self._schedules:
            # Replicas hold enough microbatches to keep all of them busy, or fewer if memory is short.
            memory_bytes = [device.memory_bytes for device in self.machine.devices]
            schedule = build_schedule(self.plan, self.scheduler, n_microbatches, memory_bytes)
            verify(schedule)
            self._schedules[n_microbatches] = schedule.without(REDUCE) if self.sums_apart else schedule
        return self._schedules[n_microbatches]

    def pass_forward(self, n_microbatches: int) -> Schedule:
        """Return a schedule of only the forwards of a batch, for any number of microbatches."""
        return self._make_passes(n_microbatches)[0]

    def pass_backward(self, n_microbatches: int) -> Schedule:
        """Return a schedule of only the backwards of a batch. It assumes that the forwards have run."""
        return self._make_passes(n_microbatches)[1]

    def _make_passes(self, n_microbatches: int) -> tuple[Schedule, Schedule]:
        if n_microbatches not in self._passes:
            made = Schedule("passes", n_microbatches, self.homes, run_forwards_first(self.homes, n_microbatches))
            self._passes[n_microbatches] = made.only(FORWARD), made.only(BACKWARD)
        return self._passes[n_microbatches]

    @property
    def inference(self) -> bool:
        """Whether the plan is only for outputs without gradients."""
        return self.scheduler.name == INFERENCE

    def find_recomputed(self, n_microbatches: int) -> set[tuple[int, int]]:
        """Return (stage, microbatch) for each forward that is run again before its backward, to save memory."""
        recomputes, stages = POLICIES[self.recompute], enumerate(self.plan.stages)
        pairs = [(i, planned.recompute, m) for i, planned in stages for m in range(n_microbatches)]
        return {(i, m) for i, planned, m in pairs if recomputes(planned, m, n_microbatches)}

    @cached_property
    def devices(self) -> list[torch.device]:
        """The torch device of each of the machine's devices."""
        return self.machine.torch_devices()

    @cached_property
    def homes(self) -> Homes:
        """The devices of each stage, as indices into the machine's devices."""
        return find_replicas(self.plan) or self.scheduler.homes(len(self.stages))

    @cached_property
    def replicas(self) -> list[list[Replica]]:
        """The replicas of each stage: one for each of its devices."""
        devices, places = self.machine.devices, self.places
        return [
            [
                # A replica of another process only stands for that replica: it copies and compiles nothing.
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
        """The stages that run on a device of this process."""
        pairs = zip(self.stages.stages, self.homes, strict=True)
        return tuple(stage for stage, home in pairs if any(map(self.runs, home)))

    @cached_property
    def copies_weights(self) -> bool:
        """Whether a stage reads copies of weights that live on another device."""
        return any(replica.copies for replicas in self.replicas for replica in replicas)

    def has_stale_copies(self) -> bool:
        """Return whether a weight has changed since it was copied to another device, by torch's counts of writes."""
        return any(replica.is_stale() for replicas in self.replicas for replica in replicas)

    @cached_property
    def compilations(self) -> Compilations | None:
        """The stages as compiled by torch.compile (None: not compiled)."""
        return None if self.compiling is None else Compilations(self.compiling)

    def tell_compilations(self) -> None:
        """Warn if torch.compile had to recompile a stage."""
        if self.compilations is not None:
            self.compilations.tell()

    @property
    def places(self) -> dict[int, torch.device]:
        """The device of each parameter and buffer, by the id() of the tensor.

        For weights of other processes it is `ELSEWHERE`.
        """
        here = {id(weight): device for weight, device in self.list_placed()}
        return {key: here.get(key, ELSEWHERE) for key in self.list_owners()}

    def list_owners(self) -> dict[int, tuple[Tensor, Stage]]:
        """Return each parameter and buffer with the stage that it lives with, by id(), in the order of the stages.

        A weight lives with the first stage that has it, unless other programs of the model put the weight elsewhere.
        """
        # A weight that two stages read lives with one; stages on other devices read copies (see Replica).
        found: dict[int, tuple[Tensor, Stage]] = {}
        for stage in self.stages.stages:
            for number, weight in enumerate(list_weights(stage.module)):
                home = self.living.get((stage.index, number), stage.index)
                found.setdefault(id(weight), (weight, self.stages[home]))
        return found

    def live_with(self, others: Sequence[Program]) -> Program:
        """Return this program with its weights on the same devices as in other programs of the same model.

        If several of `others` have a weight, the first of them decides. A weight stays with its stage if no stage of
        this program begins on that device.
        """
        known: dict[int, int] = {}
        for program in others:
            for key, (_, stage) in program.list_owners().items():
                known.setdefault(key, program.homes[stage.index][0])
        # Programs may have stages of other numbers on a device, since a stage may have several devices.
        stage_on = {home[0]: stage for stage, home in reversed([*enumerate(self.homes)])}
        held = [(stage.index, *pair) for stage in self.stages.stages for pair in enumerate(list_weights(stage.module))]
        wanted = [(stage, number, known.get(id(weight), self.homes[stage][0])) for stage, number, weight in held]
        living = {
            (stage, number): stage_on[device]
            for stage, number, device in wanted
            if device != self.homes[stage][0] and device in stage_on
        }
        return replace(self, living=living) if living else self

    def list_placed(self) -> list[tuple[Tensor, torch.device]]:
        """Return each parameter and buffer of this process with its device, in the order of the stages."""
        owners = self.list_owners().values()
        return [(weight, s.torch_device) for weight, s in owners if self.runs(self.homes[s.index][0])]

    def place_weights(self) -> None:
        """Move each stage's parameters and buffers to its device, in place: optimizers keep the same objects.

        Gradients move along. Optimizer state moves before the optimizer's next step. Weights without values (on the
        meta device) stay.
        """
        for weight, device in self.list_placed():
            before = weight.device
            if before == device or weight.is_meta:
                continue
            # Assigning `.data` keeps the parameter object, which optimizers and the model hold.
            weight.data = weight.data.to(device)
            if isinstance(weight, nn.Parameter):
                note_move(weight, before)
            # Also keep the gradient object: user code may hold it.
            if weight.grad is not None:
                weight.grad.data = weight.grad.data.to(device)
        for stage in self.stages_here:
            flatten_weights(stage.module.modules())

    def list_counted(self) -> dict[str, Tensor]:
        """Return the buffers that are read to count entries of outputs, such as class weights.

        Each has a name that is the same on all ranks.
        """
        counts = [meaning.count for meaning in self.joined if meaning.count is not None]
        whole = [one for count in counts for one in (count.counts if isinstance(count, CountWatch) else [count])]
        held = [list(c.compute.named_buffers()) if isinstance(c.compute, nn.Module) else [] for c in whole]
        return {f"{i} {name}": buffer for i, named in enumerate(held) for name, buffer in named}

    @cached_property
    def keeps_zeros(self) -> bool:
        """Whether a gradient of zero must stay zero in a backward, even if the backward divides by zero.

        A loss that is divided by a count of zero has weight zero, so its backward may be left out. But if the count is
        on an accelerator, the host does not know that the count is zero, and runs the backward.
        """
        counts = [meaning.count for meaning in self.joined if isinstance(meaning.count, Count)]
        there = any(map(accelerators.is_accelerator, self.devices))
        return there and any(not count.safe for count in counts)

    @cached_property
    def shares_parameters(self) -> bool:
        """Whether two stages share a parameter."""
        held = [id(p) for stage in self.stages.stages for p in stage.module.parameters()]
        return len(set(held)) < len(held)

    @cached_property
    def shares_leaves(self) -> bool:
        """Whether two workers on one device may add to one `.grad`.

        This is so if stages share a weight, or if two replicas of a stage are on one device.
        """
        return self.shares_parameters or any(len({self.devices[d] for d in home}) < len(home) for home in self.homes)

    def check_joinable(self, n_microbatches: int) -> None:
        """Raise InputError if the outputs of `n_microbatches` microbatches cannot be joined."""
        lost = next((meaning for meaning in self.joined if meaning.kind == "unjoined"), None)
        if n_microbatches > 1 and lost is not None:
            raise InputError(lost.why)

    def build_result(self, outputs: Sequence[Any]) -> Any:
        """Return the last stage's outputs in the containers that the model returns."""
        # torch.fx returns plain containers, and a model may return its own, such as an OrderedDict.
        plain = self.stages.fill(outputs)
        return plain if self.returns is None else pytree.tree_unflatten(pytree.tree_leaves(plain), self.returns)

    def find_rewritten_memory(self) -> frozenset[int]:
        """Return the storages of the buffers that each call writes and autograd may save for backward."""
        # Look now: since the last batch, buffers may have moved, or load_state_dict(assign=True) may have replaced
        #     them.
        here = {stage.index for stage in self.stages_here}
        buffers = (self.stages[s].module.get_buffer(path) for s, path in self.rewritten if s in here)
        return frozenset(map(get_storage_id, buffers))

    @cached_property
    def turns(self) -> ModuleLocks | None:
        """Locks for modules that several threads run and that set attributes as they run (None: none do)."""
        locks = ModuleLocks([[replica.stage.module for replica in replicas] for replicas in self.replicas])
        return locks if locks.shared else None

    @cached_property
    def noted(self) -> list[DeferredBatchNorm]:
        """The batch norms whose running statistics are updated only at the end of a batch."""
        return [m for s in self.stages_here for m in s.module.children() if isinstance(m, DeferredBatchNorm)]

    def find_hooked_stages(self) -> list[bool]:
        """Return, for each stage, whether its modules have hooks now, or register hooks on activations."""
        # Look again for every job: hooks may be registered and removed between calls.
        return [
            self.puts_hooks or any(state.get(kind) for state in map(vars, modules) for kind in HOOKS)
            for modules in self._modules
        ]

    def draws(self) -> bool:
        """Return whether a stage draws random numbers in the present mode of its modules."""
        # Not cached: the same program may serve training, where dropout draws, and evaluation.
        return any(isinstance(m, SeededCall) and not m.idle for s in self.stages.stages for m in s.module.children())

    @cached_property
    def _modules(self) -> list[list[nn.Module]]:
        """The modules of each stage.

        The list may be cached: if a module of the model is replaced, the model is compiled again.
        """
        # Cached, since every call reads it and a search for all modules is slower than a look at all weights.
        return [list(s.module.modules()) for s in self.stages.stages]

    @cached_property
    def weight_dicts(self) -> list[list[Mapping[str, Tensor | None]]]:
        """For each stage, the dictionaries in which its modules hold parameters, then the dictionaries of buffers.

        The list is empty for a stage that does not run in this process.
        """
        here = {stage.index for stage in self.stages_here}
        return [
            [m._parameters for m in modules] + [m._buffers for m in modules] if i in here else []
            for i, modules in enumerate(self._modules)
        ]

    def list_flags(self) -> tuple[bool, ...]:
        """Return the requires_grad of every parameter of all stages, including the stages of other processes."""
        return tuple([w.requires_grad for held in self._parameters for w in held.values() if w is not None])

    @cached_property
    def _parameters(self) -> list[Mapping[str, Tensor | None]]:
        """The dictionaries in which the modules of all stages hold their parameters."""
        return [m._parameters for modules in self._modules for m in modules if m._parameters]

    def list_trained(self) -> list[list[Tensor]]:
        """Return, for each stage, its weights that want a gradient now.

        The user may freeze and unfreeze parameters later.
        The list is empty for a stage that does not run in this process.
        """
        weights = [[w for held in dicts for w in held.values() if w is not None] for dicts in self.weight_dicts]
        # A dict by id: a set of tensors would call Tensor.__hash__, which is Python and slow.
        return [list({id(w): w for w in held if w.requires_grad}.values()) for held in weights]


class Batch(NamedTuple):
    """A call that is ready to run: the program, the tensors among its arguments, and the rows of each microbatch.

    numbers: Python numbers that are inputs of the graph too. Every microbatch gets all of them.
    kv_caches: the attention keys and values of each microbatch, kept from call to call (None: no cache).
    """

    program: Program
    tensors: Sequence[Tensor]
    rows: Sequence[int]
    numbers: tuple[float, ...] = ()
    kv_caches: KVCaches | None = None

    def weigh(self, meaning: OutputKind, first: int = 0, last: int | None = None) -> Weights:
        """Return the weight of each microbatch in the joined output.

        first, last: the range of the microbatches, as in a slice (default: all).
        """
        rows = self.rows[first:last]
        if meaning.count is None:
            return meaning.list_weights(rows)
        weigh = meaning.count.weigh_there if isinstance(meaning.count, Count) else meaning.count.weigh
        pieces, whole = self.cut_for_counts(rows, sum(self.rows[:first]))
        return weigh(pieces, rows, whole)

    def cut_for_counts(self, rows: Sequence[int], before: int = 0) -> tuple[list[list[Any]], list[Any]]:
        """Return the inputs from which divisors of losses are counted: in pieces of `rows` rows each, and as a whole.

        before: the number of rows of the batch that come before the first piece.
        """
        cuts = [spec.cut for spec in self.program.inputs.specs]
        whole = [cut.narrow(t.detach(), before, sum(rows)) for cut, t in zip(cuts, self.tensors, strict=True)]
        columns = [cut.split(t, rows) for cut, t in zip(cuts, whole, strict=True)]
        return [[*piece, *self.numbers] for piece in zip(*columns, strict=True)], [*whole, *self.numbers]

    def weigh_outputs(self) -> list[OutputKind]:
        """Return how each output of the program is joined, with the weights of this batch's microbatches filled in."""
        return [m if m.count is None else replace(m, weights=self.weigh(m)) for m in self.program.joined]
