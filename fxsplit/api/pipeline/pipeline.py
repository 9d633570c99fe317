"""Pipeline: the module that compile() returns, which runs the user's model in stages.

pipe(x)                          pipe.step(x, target=y)
   |                                |
Compiler.prepare -> Batch        Compiler.prepare -> Batch, then find the meaning of the loss
   |                                |
Engine.forward                   Engine.step: forwards, losses and backwards in the order of the schedule
   |                                |
outputs of the whole batch       the loss, detached; gradients are added to .grad
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from difflib import get_close_matches
from functools import wraps
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxsplit.api.compiler.compile_group import make_backend
from fxsplit.api.compiler.compiled import Compiled
from fxsplit.api.compiler.compiler import Compiler, get_mode
from fxsplit.api.generation.generate import generate, takes_generate
from fxsplit.api.generation.programs import Programs
from fxsplit.api.pipeline.exports import WithExports
from fxsplit.api.pipeline.from_ir import compile_ir
from fxsplit.api.pipeline.loss_meanings import LossMeanings
from fxsplit.api.pipeline.stream import Stream, check_has_batches
from fxsplit.errors import ClosedError, FxsplitError, InputError, NotThere
from fxsplit.frontend.capture import load_torch
from fxsplit.ir.facts.capture.call import Call
from fxsplit.ir.facts.capture.scope import Scope
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.stages import Stages
from fxsplit.ir.graph import IR
from fxsplit.runtime.engine import Engine
from fxsplit.runtime.job.status import Status
from fxsplit.runtime.job.stopwatch import Stopwatch
from fxsplit.runtime.loss.loss import BatchLoss, LossFn, find_weights, take_model_loss
from fxsplit.runtime.microbatches import Targets, split_target
from fxsplit.runtime.program import Batch, Program
from fxsplit.runtime.stage.weight_versions import Stepper, make_stepper
from fxsplit.schedule import simulate
from fxsplit.schedule.of_plan import name_places, read_footprints, read_times
from fxsplit.schedule.simulation.memory import trace_memory
from fxsplit.schedule.simulation.timeline import Timeline
from fxsplit.system.figures import check_flag, show
from fxsplit.system.interrupts import lose_no_interrupt
from fxsplit.system.logs import emit
from fxsplit.system.shown import Parts, Shown
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals.autograd.accumulate import CommitRecord
from fxsplit.torch_internals.distributed.data_parallel import warn_of_lone_step
from fxsplit.torch_internals.nn.containers import HOOKS
from fxsplit.torch_internals.nn.copies import copy_module
from fxsplit.torch_internals.scopes.undo import CallerLock, restores_all
from fxsplit.torch_internals.thread_modes import disable_gradients, refuse_foreign_modes
from fxsplit.torch_internals.torch_compile.runs_uncompiled import leave_uncompiled

P = ParamSpec("P")
R = TypeVar("R")


def act_together(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method of a pipeline: an interrupt always ends it, and all ranks raise the first error of any rank."""

    @wraps(method)
    def acting(*args: P.args, **kwargs: P.kwargs) -> R:
        pipeline: Any = args[0]
        group = pipeline.compiler.compile_group
        # The time limit of a step includes all waiting for other ranks.
        timeout_s: Any = kwargs.get("timeout_s")
        try:
            with nullcontext() if group is None else group.world.watch(timeout_s, firm=timeout_s is not None):
                return method(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, InputError):
                what = method.__name__.strip("_")
                emit("faults", f"{what}_failed", f"{what} of {pipeline!r} has failed", error=error)
            raise

    return lose_no_interrupt(acting)


class Pipeline(Shown, WithExports):
    """A model run as a pipeline of stages.

    Parameters, buffers, submodules, hooks and mode are the model's own (the very same dictionaries), so state_dict(),
    parameters(), train(), eval() and optimizers see the unsplit model. A call gives the outputs that the model gives on
    each microbatch, joined. `step` also runs loss and backward, in the chosen schedule. `compiler` holds the options
    and compiles the programs.
    """

    def __init__(self, compiler: Compiler) -> None:
        path = next((path for path, m in compiler.model.named_modules() if isinstance(m, Pipeline)), None)
        if path is not None:
            what = f"submodule {path!r} of the model" if path else "model"
            raise InputError(f"{what} is a pipeline already: compile the model it was made from, its .model")
        # A method with leave_uncompiled makes torch load its compiler at the method's first call: load it now.
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

    @classmethod
    @lose_no_interrupt
    @restores_all
    def of(cls, ir: IR, *, loss_fn: LossFn | None = None, check_rewrites: bool = True) -> Pipeline:
        """Return a pipeline that runs the stages of an IR: `Pipeline.of(fxsplit.run(captured, chain))`.

        ir: an IR after `emit`, which began with `fxsplit.capture` or `fxsplit.load_ir(path, model, example_inputs)`.
        loss_fn: loss_fn(outputs, target) -> scalar, for `step`.
        check_rewrites: run the stages on the example, and compare them with the model's captured graph.

        Other modes and shapes are compiled by the passes of `ir.steps`, with the same plan. Raises MissingFact for an
        IR without stages, and BrokenFact for stages that compute something else than the model.
        """
        return cls(compile_ir(ir, loss_fn, check_rewrites=check_rewrites))

    # The module

    @property
    def plan(self) -> Plan:
        """The plan of the present mode, or of the other mode if only the other is compiled; `print` shows a table."""
        return self._present().program.plan

    @property
    def costs(self) -> Costs:
        """The measured profile: `pipe.costs.save(path)`, then `fxsplit.compile(..., costs=path)`."""
        costs = self._present().costs
        if costs is None:
            raise NotThere("this pipeline's chain measured nothing: put 'profile' into passes=")
        return costs

    @property
    def stages(self) -> Stages:
        """The stages of the graph, as they run: `print(pipe.stages[0].code)` shows the code of the first."""
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
        """How the model became a graph: symbolic_trace (perhaps with whole submodules), export or graph_module."""
        return self.traced[Scope].front_end

    def summarise(self) -> str:
        """Return the name of the model and a summary of the plan."""
        name = type(self.model).__name__
        if self.compiler.get_compiled(get_mode(self.model)) is None:
            return f"{name}, compiles on its first call"
        return f"{name}, {self.plan.summarise()}"

    def show(self) -> Parts:
        """Yield one line about the pipeline, and its plan if there is one."""
        yield repr(self)
        if self.compiler.get_compiled(get_mode(self.model)) is not None:
            yield from self.plan.show()

    def embed(self) -> str:
        """Return the pictures of the plan and of the predicted step as HTML, for notebooks; empty without a plan."""
        if self.compiler.get_compiled(get_mode(self.model)) is None:
            return ""
        from fxsplit.report.picture import embed_timelines

        return self.plan.embed() + embed_timelines([self._predict(self._present().program)])

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        """Return a pipeline over a copy of the model, with the same options. It compiles on its first call."""
        # A dump folder is for one compile.
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
        """Wait until no batch runs, then set the mode with the model's own train(). Batches that come later wait."""
        with self.keep_idle():
            return super().train(mode)

    # Running it

    @leave_uncompiled
    @act_together
    def compile_for(self, *args: Any, **kwargs: Any) -> None:
        """Compile the present mode for calls like this one, unless that is done already."""
        self._check_open()
        self.compiler.program(get_mode(self.model), Call(tuple(args), dict(kwargs)))

    @leave_uncompiled
    @act_together
    @restores_all
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs, computed microbatch by microbatch; differentiable."""
        batch, engine = self._prepare_forward(Call(tuple(args), dict(kwargs)))
        if self.tracker is not None:
            self.tracker.deliver()
        program = batch.program
        never = program.detached is not None or self.compiler.options.inference
        if never:
            self._warn_of_no_gradients(program.detached)
        trains = torch.is_grad_enabled() and not never
        timing = self.tracker.begin(program) if trains and self.tracker is not None else None
        with disable_gradients() if never else nullcontext():
            return program.build_result(engine.forward(batch, timing))

    @leave_uncompiled
    def stream(self, batches: Iterable[Any]) -> Stream:
        """Return an iterator over the outputs for `batches`, without gradients, that keeps all stages busy.

        batches: an iterable, such as a DataLoader, of batches as `compile` takes example_inputs: tensors, tuples of
            arguments or dicts of keyword arguments. Enough batches are read ahead to keep all stages busy, and outputs
            come in the same order.

        Do not change weights meanwhile. If a batch fails, its error comes in its place, and ends the stream. The stream
        also ends after `close()`, or with the last reference to it. Over ranks each batch runs by itself.
        Raises InputError if `batches` is no such iterable.
        """
        self._refuse_own_hooks("stream()")
        check_has_batches(batches)
        # A rank runs one job at a time.
        return Stream(self._prepare_forward if self.compiler.compile_group is None else None, self.forward, batches)

    @leave_uncompiled
    @lose_no_interrupt
    @restores_all
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the model's own generate(), for a Hugging Face model that generates text.

        The arguments are those of transformers' `GenerationMixin.generate`, such as `input_ids`, `attention_mask` and
        `max_new_tokens`; greedy and sampled. The tokens equal the model's own; torch.manual_seed() sets them as it does
        there. Rows are cut into microbatches, and each stage keeps their keys and values on its device, for this call.
        The first call compiles two steps, or three with an encoder, and later calls compile none, at any length.

        Raises InputError for a model that keeps more than keys and values or is in training mode, and for beam search
        and other ways to generate in which rows exchange their keys and values. If the model's class has its own
        generate(), that runs the model unsplit.
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

        target: a tensor, or tuple or dict of tensors, with one row for each row of the input. Without a loss_fn the
            loss is the one that the model itself returns, as Hugging Face's models do for `labels=`.
        return_outputs: return (loss, outputs), both detached.
        losses: a list to which the loss of each microbatch is appended, detached and before weighting.
        optimizer: for PipeDream and PipeDream-2BW only. Their batch is a stream, and `optimizer` steps as its
            microbatches come back: after each microbatch, or after each n_devices microbatches, with their mean loss.
            The step starts by setting every `.grad` to None. If it fails, the optimizer has stepped for the
            microbatches before.
        timeout_s: the time limit of forwards and backwards, in seconds.
        atomic: with False, gradients are added to an existing `.grad` while the step runs. That saves the memory of one
            set of gradients, but a step that fails has changed some of them.

        The loss is that of the whole batch. If the loss function is a mean, microbatches are weighted by their rows; if
        it divides by a count of labels, by their counts; if it is a sum, they are added. `loss_fn.reduction` says
        which, or the first step finds it out by computing the loss on pieces of each microbatch. Any other loss, such
        as one that compares rows, is averaged by rows with a warning, or refused if the model returns it.

        No `.grad` changes if a step fails, not even in your own gradient hook, but buffers such as batch norm's
        statistics may have changed. If an interrupt comes after all gradients were added, a note on it says so.

        Raises StepTimeout, with the present operation of each worker, if the step takes longer than `timeout_s`.
        """
        _check_step_options(return_outputs=return_outputs, losses=losses, timeout_s=timeout_s, atomic=atomic)
        commit = CommitRecord(atomic=atomic)
        try:
            found = self._step(args, kwargs, target, optimizer, commit, keep_outputs=return_outputs, losses=losses,
                               timeout_s=timeout_s)  # fmt: skip
            if self.tracker is not None:
                self.tracker.deliver()
            return found
        except BaseException as error:
            commit.note_on(error)
            raise

    @leave_uncompiled
    @act_together
    def trace(
        self, *args: Any, target: Any = None, optimizer: Optimizer | None = None, **kwargs: Any
    ) -> tuple[Timeline, Timeline]:
        """Run one training step as `step` does; return two timelines: (measured, predicted).

        Give them to `fxsplit.report`: `save_picture([predicted, measured], "step.svg")`, `save_trace` for Perfetto,
        `draw` for the terminal. The first steps are slower than later ones: trace a later step.
        """
        batch, loss, stepper = self._prepare_step(args, kwargs, target, optimizer, "trace")
        program = batch.program
        schedule = program.schedule(len(batch.rows))
        watch = Stopwatch(schedule)
        engine = self._engine or self._start_engine(program)
        engine.step(batch, loss, keep_outputs=False, stepper=stepper, watch=watch)
        predicted = self._predict(program, len(batch.rows))
        measured = watch.make_timeline(predicted.devices)
        return replace(measured, places=predicted.places), predicted

    def _predict(self, program: Program, n_microbatches: int | None = None) -> Timeline:
        """Return the step that the costs of the plan predict, to compare it with a measured one."""
        plan = program.plan
        schedule = program.schedule(n_microbatches or plan.n_microbatches)
        simulation = simulate(schedule, read_times(plan, schedule))
        names = tuple(d.name for d in program.machine.devices[: schedule.n_devices])
        places = name_places(plan, schedule)
        timeline = Timeline.of(simulation, names, trace_memory(simulation, read_footprints(plan)), places)
        return replace(timeline, title=f"{schedule.name}, predicted{plan.reliability}")

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
        """Run one training step. Even if an error is raised, `commit` says whether the gradients were added."""
        batch, loss, stepper = self._prepare_step(args, kwargs, target, optimizer)
        if keep_outputs:
            batch.program.check_joinable(len(batch.rows))
        engine = self._engine or self._start_engine(batch.program)
        timing = None if self.tracker is None else self.tracker.begin(batch.program)
        watch = None if timing is None else timing.start(batch.program.schedule(len(batch.rows)))
        found = engine.step(
            batch, loss, keep_outputs=keep_outputs, stepper=stepper, watch=watch, commit=commit, timeout_s=timeout_s
        )
        if timing is not None:
            timing.end()
        if losses is not None:
            losses += loss.list_losses()
        return found

    def _prepare_step(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        target: Any,
        optimizer: Optimizer | None,
        method: str = "step",
    ) -> tuple[Batch, BatchLoss, Stepper | None]:
        """Return the batch, the loss and the stepper of a training step. Raises InputError for unusable arguments.

        The stepper steps the optimizer between microbatches; None unless the schedule is asynchronous.
        """
        loss_fn = self.compiler.options.loss_fn
        if loss_fn is None and target is not None:
            raise InputError(
                f"{method}() needs a loss: compile with loss_fn=, for example "
                "fxsplit.compile(model, 2, loss_fn=torch.nn.functional.cross_entropy)"
            )
        # All positional arguments are the model's, so nothing else would notice a forgotten target.
        if loss_fn is not None and target is None:
            misspelt = "".join(f", and not {name}=" for name in get_close_matches("target", kwargs, n=1))
            raise InputError(f"{method}() needs the target of its loss by name: pipe.{method}(x, target=y){misspelt}")
        if self.compiler.options.inference:
            raise InputError(f"{method}() cannot train a pipeline compiled with inference=True: compile without it")
        if not torch.is_grad_enabled():
            raise InputError(
                f"{method}() runs a training step, and under no_grad has no gradients to compute: call pipe(x) to "
                f"evaluate, or {method}() outside of no_grad"
            )
        self._refuse_own_hooks(f"{method}()")
        # A search for an object that encloses the pipeline takes long, and such objects rarely come later: once is
        # enough.
        if not self._stepped:
            if self.compiler.compile_group is None:
                warn_of_lone_step(self)
            self._stepped = True
        batch = self._prepare(args, kwargs)
        if batch.program.detached is not None:
            raise InputError(
                f"{method}() cannot train this pipeline, which is {batch.program.detached}: compile for training "
                "without that pass, or call pipe.train() if the pass does nothing in training"
            )
        if any(t.requires_grad for t in batch.tensors):
            raise InputError(
                f"an input of {method}() wants a gradient, which {method}() does not return: call pipe(x) and "
                "backward()"
            )
        # With an asynchronous schedule the optimizer steps between microbatches: `schedule.steps` groups their losses.
        schedule = batch.program.schedule(len(batch.rows))
        stepper = None if schedule.synchronous and optimizer is None else make_stepper(schedule, optimizer)
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

    def report(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        target: Any = None,
        optimizer: Optimizer | None = None,
        seconds: float = 20.0,
        **kwargs: Any,
    ) -> None:
        """Write one HTML file that shows the plan, why it is so, its step, and what changes would bring.

        path: the file, such as "report.html"; it needs no server and no network.
        args, target, optimizer, kwargs: a batch, as `step` takes it. With one, a training step is run and measured, as
            `trace` does, and the report shows it too.
        seconds: the time for planning with other devices, bandwidths, microbatches and faster layers.

        Raises FileError if the file cannot be written; an existing file is then unchanged.
        """
        from fxsplit.api.report.of_pipeline import report_pipeline  # only reports need planning and a template

        measured = None
        if args or kwargs or target is not None:
            measured, _ = self.trace(*args, target=target, optimizer=optimizer, **kwargs)
        report_pipeline(self._present(), path, measured, seconds)

    def status(self) -> Status:
        """Return the present operation of each worker; call it from another thread, or after an interrupt."""
        return Status() if self._engine is None else self._engine.get_status()

    def close(self) -> None:
        """Wait for all checkpoints of the pipeline to be written, then end its threads.

        The threads also end with the last reference to the pipeline.
        """
        self._closed = True
        try:
            self.track(None)
        finally:
            self.finish_saving()
            if self._engine is not None:
                self._engine.close()

    def _prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        """Return a call as a batch that is ready to run. Compiles if there is no program for the call."""
        self._check_open()
        refuse_foreign_modes()
        # A compile in prepare() waits until nothing runs, so a caller inside a running batch would wait for itself.
        if self._engine is not None:
            self._engine.refuse_own_callers()
        return self.compiler.prepare(get_mode(self.compiler.model), Call(tuple(args), dict(kwargs)))

    def _prepare_forward(self, call: Call) -> tuple[Batch, Engine]:
        """Return a call as a batch that is ready to run, and the engine to run it.

        Checks that outputs can be joined.
        """
        batch = self._prepare(*call)
        batch.program.check_joinable(len(batch.rows))
        return batch, self._engine or self._start_engine(batch.program)

    def _warn_of_no_gradients(self, detached: str | None) -> None:
        """Warn if the caller may expect gradients of outputs, but the pipeline is detached; `detached` says why."""
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters())
        if detached is not None and trains:
            warn_user(
                f"the outputs of this pipeline carry no gradients, as it is {detached}: call it under torch.no_grad()"
            )

    def _refuse_own_hooks(self, what: str) -> None:
        """Raise InputError if the model itself has hooks. They run only in calls of the module, and not in `what`."""
        if any(self.__dict__[kind] for kind in HOOKS):
            raise InputError(f"the model itself has hooks, which {what} would not run: remove them, or call pipe(x)")

    def keep_idle(self) -> AbstractContextManager[None]:
        """Wait for the batches under way, and return a block in which no batch runs."""
        return nullcontext() if self._engine is None else self._engine.keep_idle()

    def _check_open(self) -> None:
        """Raise ClosedError if the pipeline's threads have ended, are in another process, or if Python is ending."""
        # While Python ends, torch aborts if tensors are made, as by a step in a __del__.
        if sys.is_finalizing():
            raise ClosedError("Python is about to end: run the pipeline before")
        if self._closed:
            raise ClosedError("the pipeline is closed: compile the model again")
        # A fork copies the locks and queues of the workers, but not their threads: a call would wait for ever.
        if self._process != os.getpid():
            raise ClosedError("the pipeline's threads stayed in the process that forked: compile again")

    @restores_all
    def _start_engine(self, program: Program) -> Engine:
        """Return the engine, after starting it if this is the first time; both modes run on the same machine."""
        # Threads start only now: a pipeline that is only planned and printed needs none.
        with self._starting.take():
            if self._engine is None:
                engine = Engine(make_backend(program.machine, self.compiler.compile_group))
                self.compiler.pause = engine.pause
                # Last, since a pipeline that has an engine does not come here again.
                self._engine = engine
            return self._engine

    def _present(self) -> Compiled:
        """Return what is compiled for the present mode, or else for the other mode.

        Raises NotThere if nothing is compiled.
        """
        compiled = self.compiler.get_compiled(get_mode(self.model))
        if compiled is None:
            raise NotThere("nothing is compiled yet: call the pipeline once, or pass example_inputs= to compile()")
        return compiled


def _check_step_options(*, return_outputs: object, losses: object, timeout_s: Any, atomic: object) -> None:
    """Raise InputError for an option of step() that is of another type, or a time limit that is no time."""
    for name, flag in (("return_outputs", return_outputs), ("atomic", atomic)):
        # Look first: every step comes here.
        if not isinstance(flag, bool):
            check_flag(name, flag)
    if not (losses is None or isinstance(losses, list)):
        raise InputError(f"losses={show(losses)}: give a list, to which the loss of each microbatch is appended")
    # True is a number in Python, but no time.
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not (timeout_s is None or (is_number and timeout_s > 0)):
        raise InputError(f"timeout_s={show(timeout_s)} is no time: give seconds, such as 60.0, or None for no limit")
