"""Pipeline: the module that compile() returns; it is the user's model with another way of running.

A call goes to the compiler, which gives the program that runs it, and then with the program to the engine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxsplit.api.compiler.compile_group import CompileGroup
from fxsplit.api.compiler.compiled import Compiled, get_mode
from fxsplit.api.compiler.compiler import Compiler
from fxsplit.api.generation.generate import generate, takes_generate
from fxsplit.api.generation.programs import Programs
from fxsplit.api.pipeline.exports import WithExports
from fxsplit.api.pipeline.loss_meanings import LossMeanings
from fxsplit.api.pipeline.stream import Stream, check_has_batches
from fxsplit.api.pipeline.together import act_together
from fxsplit.errors import ClosedError, FxsplitError, InputError
from fxsplit.frontend.capture import load_torch
from fxsplit.ir.facts.capture.call import Call
from fxsplit.ir.facts.capture.scope import Scope
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import Plan, format_spread
from fxsplit.ir.facts.stages import Stages
from fxsplit.ir.graph import IR
from fxsplit.runtime.backends.backend import Backend
from fxsplit.runtime.backends.threads import ThreadBackend
from fxsplit.runtime.engine import Engine
from fxsplit.runtime.job.status import Status
from fxsplit.runtime.job.stopwatch import Stopwatch
from fxsplit.runtime.loss.loss import BatchLoss, find_weights, take_model_loss
from fxsplit.runtime.loss.targets import Targets
from fxsplit.runtime.microbatches import split_target
from fxsplit.runtime.program import Batch, Program
from fxsplit.runtime.ranks.backend import RankBackend
from fxsplit.runtime.stage.weight_versions import Stepper, make_stepper
from fxsplit.schedule import simulate
from fxsplit.schedule.of_plan import name_places, read_footprints, read_times
from fxsplit.schedule.simulation.memory import trace_memory
from fxsplit.schedule.simulation.timeline import Timeline
from fxsplit.system.interrupts import lose_no_interrupt
from fxsplit.system.shown import Parts, Shown
from fxsplit.torch_internals.autograd.accumulate import CommitRecord
from fxsplit.torch_internals.distributed.data_parallel import warn_of_lone_step
from fxsplit.torch_internals.nn.containers import HOOKS
from fxsplit.torch_internals.nn.copies import copy_module
from fxsplit.torch_internals.scopes.undo import CallerLock, restores_all
from fxsplit.torch_internals.thread_modes import keep_modes, refuse_foreign_modes
from fxsplit.torch_internals.torch_compile.uncompiled import leave_uncompiled
from fxsplit.torch_internals.user_lines import warn_user


class Pipeline(Shown, WithExports):
    """A model run as a pipeline of stages.

    Parameters, buffers, submodules, hooks and mode are the model's own (the very same dictionaries), so state_dict(),
    parameters(), train(), eval() and optimizers see the unsplit model. Calling it equals calling the model on each
    microbatch and joining the outputs; `step` also runs loss and backward, in the schedule chosen. `compiler` is what
    compiles the pipeline, with its options.
    """

    def __init__(self, compiler: Compiler) -> None:
        path = next((path for path, m in compiler.model.named_modules() if isinstance(m, Pipeline)), None)
        if path is not None:
            what = f"submodule {path!r} of the model" if path else "model"
            raise InputError(f"{what} is a pipeline already: compile the model it was made from, its .model")
        # Methods that keep torch.compile out make torch load the compiler when the first of them is called.
        load_torch()
        super().__init__(compiler.model)
        self.__dict__["compiler"] = compiler
        self._engine: Engine | None = None
        self._programs: Programs | None = None
        self._loss_meanings = LossMeanings(compiler.options.loss_fn, side_by_side=compiler.options.side_by_side)
        self._starting = CallerLock()  # the first batches of several threads share one engine
        self._stepped = False
        self._closed = False
        self._process = os.getpid()

    # What the module is

    @property
    def plan(self) -> Plan:
        """The plan of the present mode (or of the other, where only that is compiled); print it."""
        return self._present().program.plan

    @property
    def costs(self) -> Costs:
        """The measured profile: `pipe.costs.save(path)`, then `fxsplit.compile(..., costs=path)`."""
        costs = self._present().costs
        if costs is None:
            raise InputError("this pipeline's chain measured nothing: put 'profile' into passes=")
        return costs

    @property
    def stages(self) -> Stages:
        """The emitted stages; `print(pipe.stages[0].code)`."""
        return self._present().program.stages

    @property
    def ir(self) -> IR:
        """The IR after the last pass."""
        return self._present().final

    @property
    def traced(self) -> IR:
        """The IR before the first pass: the captured graph, and the Example that it was captured with."""
        return self._present().captured

    @property
    def front_end(self) -> str:
        """How the model became a graph: symbolic_trace (perhaps with submodules kept whole), export or graph_module."""
        return self.traced[Scope].front_end

    def summarise(self) -> str:
        """Return what the pipeline is of, and how it runs."""
        name = type(self.model).__name__
        if self.compiler.get_compiled(get_mode(self.model)) is None:
            return f"{name}, compiles on its first call"
        return f"{name}, {self.plan.summarise()}"

    def show(self) -> Parts:
        """Return what the pipeline is of, and its plan if there is one."""
        yield repr(self)
        if self.compiler.get_compiled(get_mode(self.model)) is not None:
            yield from self.plan.show()

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        """Return a pipeline over a copy of the model, with the same options, that compiles on its first call."""
        # A dump is of one compile.
        options = replace(self.compiler.options, dump=None)
        made = memo[id(self)] = Pipeline(self.compiler.recompile_like(copy_module(self.model, memo), options))
        return made

    def __copy__(self) -> NoReturn:
        raise FxsplitError(
            "a pipeline cannot be copied without its model, as it has threads: copy.deepcopy(pipe) gives a pipeline "
            "over a copy of the model"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise FxsplitError("a pipeline cannot be pickled, it has threads: save pipe.state_dict() instead")

    def train(self, mode: bool = True) -> Any:
        """Set the mode as the model itself does, after waiting for batches that are under way; others begin later."""
        with self.keep_idle():
            return super().train(mode)

    # What it does

    @leave_uncompiled
    @act_together
    def compile_for(self, *args: Any, **kwargs: Any) -> None:
        """Compile the present mode for calls like this one, unless it is compiled already."""
        self._check_open()
        self.compiler.program(get_mode(self.model), Call(tuple(args), dict(kwargs)))

    @leave_uncompiled
    @act_together
    @restores_all
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns, computed microbatch by microbatch; differentiable."""
        batch, engine = self._prepare_forward(Call(tuple(args), dict(kwargs)))
        program = batch.program
        never = program.detached is not None or self.compiler.options.inference
        with _give_no_gradients(self.model, program.detached) if never else nullcontext():
            return program.build_result(engine.forward(batch))

    @leave_uncompiled
    def stream(self, batches: Iterable[Any]) -> Stream:
        """Return an iterator over the outputs for `batches`, in order and without gradients; stages never run empty.

        batches: an iterable, such as a DataLoader, of what `compile` takes as example_inputs: tensors, tuples of
            arguments or dicts of keyword arguments, which are read ahead by as many as keep all stages busy.

        Weights are to stay as they are meanwhile. What a batch raises, comes in its place; the stream is over then, as
        it is after `close()`, or when nobody refers to it any more. Over ranks each batch runs by itself.
        Raises InputError for what is no such iterable.
        """
        self._refuse_own_hooks("stream()")
        check_has_batches(batches)
        # A rank runs one job at a time.
        return Stream(self._prepare_forward if self.compiler.compile_group is None else None, self.forward, batches)

    @leave_uncompiled
    @lose_no_interrupt
    @restores_all
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own generate() returns, for a Hugging Face model that generates text.

        The arguments are those of transformers' `GenerationMixin.generate`, such as `input_ids`, `attention_mask` and
        `max_new_tokens`; greedy and sampled. Tokens are the model's own, and so is what torch.manual_seed() rules. Rows
        are cut into microbatches, and each stage keeps their keys and values on its device, for this call. The first
        call compiles two steps, or three with an encoder, and later ones none, however long they are.

        Raises InputError for a model that keeps more than keys and values or is in training mode, and for beam search
        and other ways to generate in which rows exchange theirs. A model with a generate() of its own class runs it
        unsplit.
        """
        if not takes_generate(self.model) and hasattr(self.model, "generate"):
            own: Any = self.model
            return own.generate(*args, **kwargs)
        self._check_open()
        self._programs = self._programs or Programs(self.compiler, self._start_engine)
        return generate(self._programs, args, kwargs)

    @overload
    def step(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: Literal[False] = False,
        losses: list[Tensor] | None = None,
        optimizer: Optimizer | None = None,
        timeout_s: float | None = None,
        atomic: bool = True,
        **kwargs: Any,
    ) -> Tensor: ...

    @overload
    def step(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: Literal[True],
        losses: list[Tensor] | None = None,
        optimizer: Optimizer | None = None,
        timeout_s: float | None = None,
        atomic: bool = True,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]: ...

    @leave_uncompiled
    def step(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = False,
        losses: list[Tensor] | None = None,
        optimizer: Optimizer | None = None,
        timeout_s: float | None = None,
        atomic: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run one training step in the pipeline's schedule; add gradients to `.grad`; return the loss, detached.

        `target` is a tensor, or tuple or dict of tensors, with one row for each row of the input. Without a loss_fn the
        loss is the one that the model itself returns, as Hugging Face's models do for `labels=`. The loss is that of
        the whole batch: microbatches are weighted by their rows where it is a mean, by their counts where it is divided
        by a count of labels, and summed where it is a sum, as `loss_fn.reduction` says or the first step finds out,
        which computes the loss on pieces of each microbatch for it. A loss that is none of these, as one that compares
        rows, is averaged by rows with a warning; one that the model returns is refused then. With `return_outputs` the
        result is (loss, outputs), both detached. No `.grad` changes when a step fails, in a gradient hook of yours too.
        Buffers, such as batch norm's statistics, may have changed. An interrupt that comes when all gradients have been
        added says so in a note. Raises StepTimeout, which says what each worker does, where forwards and backwards take
        longer than `timeout_s` seconds.

        `losses` is a list to which the loss of each microbatch is appended, detached and as it is before weighting.
        `atomic=False` adds to each `.grad` that is there already while the step runs. That saves the memory of a set of
        gradients, and a step that fails has changed some of them then.

        Under PipeDream and PipeDream-2BW the batch is a stream, and `optimizer` steps as its microbatches come back:
        after each of them, or after each n_devices of them, whose mean loss is then what that step minimises. It
        starts by setting every `.grad` to None. One that fails has stepped as far as it came.
        """
        if timeout_s is not None and not timeout_s > 0:
            raise InputError(f"timeout_s={timeout_s!r} is no time: give seconds, such as 60.0, or None for no limit")
        commit = CommitRecord(atomic=atomic)
        try:
            return self._step(args, kwargs, target, optimizer, commit, keep_outputs=return_outputs, losses=losses,
                              timeout_s=timeout_s)  # fmt: skip
        except BaseException as error:
            commit.note_on(error)
            raise

    @leave_uncompiled
    @act_together
    def trace(
        self, *args: Any, target: Any = None, optimizer: Optimizer | None = None, **kwargs: Any
    ) -> tuple[Timeline, Timeline]:
        """Run one training step as `step` does; return what every device did when, and what the plan predicts.

        Both are timelines for `fxsplit.report`: `save_picture([predicted, measured], "step.svg")`, `save_trace` for
        Perfetto, `draw` for the terminal. The first steps are slower than later ones: trace one of those.
        """
        batch, loss, stepper = self._prepare_step(args, kwargs, target, optimizer)
        program = batch.program
        schedule = program.schedule(len(batch.rows))
        watch = Stopwatch(schedule)
        self._start_engine(program).step(batch, loss, keep_outputs=False, stepper=stepper, watch=watch)
        # Simulated with the costs that were planned with, to lay beside what was measured just now.
        simulation = simulate(schedule, read_times(program.plan, schedule))
        names = tuple(d.name for d in program.machine.devices[: schedule.n_devices])
        places = name_places(program.plan, schedule)
        predicted = Timeline.of(simulation, names, trace_memory(simulation, read_footprints(program.plan)), places)
        title = f"{schedule.name}, predicted{format_spread(program.plan.spread)}"
        return replace(watch.make_timeline(names), places=places), replace(predicted, title=title)

    @act_together
    def _step(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        target: Any,
        optimizer: Optimizer | None,
        commit: CommitRecord,
        *,
        keep_outputs: bool,
        losses: list[Tensor] | None,
        timeout_s: float | None,
    ) -> Any:
        """Run one training step; `commit` says whether its gradients were added, whatever this raises."""
        batch, loss, stepper = self._prepare_step(args, kwargs, target, optimizer)
        if keep_outputs:
            batch.program.check_joinable(len(batch.rows))
        found = self._start_engine(batch.program).step(
            batch, loss, keep_outputs=keep_outputs, stepper=stepper, commit=commit, timeout_s=timeout_s
        )
        if losses is not None:
            losses += loss.list_losses()
        return found

    def _prepare_step(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, optimizer: Optimizer | None
    ) -> tuple[Batch, BatchLoss, Stepper | None]:
        """Return what a training step is run with; raises InputError for arguments that no step can be made of."""
        loss_fn = self.compiler.options.loss_fn
        if loss_fn is None and target is not None:
            raise InputError(
                "step() needs a loss: compile with loss_fn=, for example "
                "fxsplit.compile(model, 2, loss_fn=torch.nn.functional.cross_entropy)"
            )
        # All positional arguments are the model's, so a forgotten target would be found by nobody else.
        if loss_fn is not None and target is None:
            misspelt = "".join(f", and not {name}=" for name in get_close_matches("target", kwargs, n=1))
            raise InputError(f"step() needs the target of its loss by name: pipe.step(x, target=y){misspelt}")
        if self.compiler.options.inference:
            raise InputError("step() cannot train what was compiled with inference=True: compile without it")
        if not torch.is_grad_enabled():
            raise InputError("step() under no_grad has no gradients to compute: call pipe(x) to evaluate")
        self._refuse_own_hooks("step()")
        # Looking for what is around a pipeline takes long, and it is seldom put into something later.
        if not self._stepped and self.compiler.compile_group is None:
            warn_of_lone_step(self)
        self._stepped = True
        batch = self._prepare(args, kwargs)
        if batch.program.detached is not None:
            raise InputError(
                f"step() cannot train this pipeline, which is {batch.program.detached}: compile for training without "
                "that pass, or call pipe.train() if the pass leaves training alone"
            )
        if any(t.requires_grad for t in batch.tensors):
            raise InputError(
                "an input of step() wants a gradient, which step() does not return: call pipe(x) and backward()"
            )
        # An asynchronous schedule lets the optimizer step between microbatches: their losses have weights of their own.
        schedule = batch.program.schedule(len(batch.rows))
        stepper = make_stepper(schedule, optimizer)
        targets = None
        if loss_fn is not None:
            targets = Targets(split_target(target, batch.rows, batch.program.inputs), target)
        meaning = self._loss_meanings.find(batch)
        weigh = find_weights(batch, targets, meaning)
        return (
            batch,
            BatchLoss(loss_fn or take_model_loss, targets, batch.rows, schedule.steps, meaning, weigh),
            stepper,
        )

    def status(self) -> Status:
        """Return what each worker does now; call it from another thread, or after an interrupt."""
        return Status() if self._engine is None else self._engine.get_status()

    def close(self) -> None:
        """End, once all checkpoints of it are written. Threads also end with the last reference to the pipeline."""
        self._closed = True
        self.finish_saving()
        if self._engine is not None:
            self._engine.close()

    def _prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        """Return a call ready to run, compiled for if need be."""
        self._check_open()
        refuse_foreign_modes()
        # What comes next may wait until nothing runs.
        if self._engine is not None:
            self._engine.refuse_own_callers()
        return self.compiler.prepare(get_mode(self.model), Call(tuple(args), dict(kwargs)))

    def _prepare_forward(self, call: Call) -> tuple[Batch, Engine]:
        """Return a call whose outputs can be joined, ready to run, and the engine to run it."""
        batch = self._prepare(*call)
        batch.program.check_joinable(len(batch.rows))
        return batch, self._start_engine(batch.program)

    def _refuse_own_hooks(self, what: str) -> None:
        """Raise InputError where the model itself has hooks: `what` is no call of the module, around which they run."""
        if any(self.__dict__[kind] for kind in HOOKS):
            raise InputError(f"the model itself has hooks, which {what} would not run: remove them, or call pipe(x)")

    def keep_idle(self) -> AbstractContextManager[None]:
        """Return a block in which no batch runs, after waiting for those that are under way."""
        return nullcontext() if self._engine is None else self._engine.keep_idle()

    def _check_open(self) -> None:
        """Raise ClosedError where the pipeline's threads have ended, or are in another process."""
        # torch aborts where tensors are made then, as by a step in a __del__.
        if sys.is_finalizing():
            raise ClosedError("Python is about to end: run the pipeline before")
        if self._closed:
            raise ClosedError("the pipeline is closed: compile the model again")
        # A fork copies the locks and queues of the workers, but not their threads: a call would wait for ever.
        if self._process != os.getpid():
            raise ClosedError("the pipeline's threads stayed in the process that forked: compile again")

    @restores_all
    def _start_engine(self, program: Program) -> Engine:
        """Return the engine, started for the first batch; both modes run on the same machine."""
        # Threads are started as late as this: a pipeline that is only planned and looked at needs none.
        with self._starting.take():
            if self._engine is None:
                self._engine = Engine(_make_backend(program.machine, self.compiler.compile_group))
            self.compiler.pause = self._engine.pause
            return self._engine

    def _present(self) -> Compiled:
        """Return what is compiled for the present mode, or for the other one, to look at."""
        compiled = self.compiler.get_compiled(get_mode(self.model))
        if compiled is None:
            raise InputError("nothing is compiled yet: call the pipeline once, or pass example_inputs= to compile()")
        return compiled


def _make_backend(machine: Machine, compile_group: CompileGroup | None) -> Backend:
    """Return threads for all devices of a machine, or this process beside the other ranks of its group."""
    if compile_group is not None:
        return RankBackend(compile_group.world, compile_group.label, compile_group.placement, compile_group.reduction)
    return ThreadBackend(machine.torch_devices(), machine.intraop_threads(), [d.name for d in machine.devices])


@contextmanager
def _give_no_gradients(model: nn.Module, reason: str | None = None) -> Iterator[None]:
    """Switch gradients off in the block; with a `reason`, warn if the caller may count on them."""
    if reason is not None and torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
        warn_user(f"the outputs of this pipeline carry no gradients, as it is {reason}: call it under torch.no_grad()")
    with keep_modes():
        torch.set_grad_enabled(False)
        yield
