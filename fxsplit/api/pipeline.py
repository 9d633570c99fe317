"""Pipeline: the module that compile() returns; it is the user's model with another way of running."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxsplit.errors import ClosedError, FxsplitError, InputError
from fxsplit.formats.safetensors_files import WeightFiles
from fxsplit.ir.facts.call import Inputs
from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.effects import CallEffects
from fxsplit.ir.facts.example import Example
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.scope import Scope
from fxsplit.ir.facts.stages import Stages
from fxsplit.ir.graph import IR
from fxsplit.runtime.engine import Engine
from fxsplit.runtime.loss import BatchLoss, LossFn, take_model_loss
from fxsplit.runtime.microbatches import choose_count, divide_rows, split_target
from fxsplit.runtime.program import Program
from fxsplit.runtime.stage.weight_versions import make_stepper
from fxsplit.runtime.stopwatch import Stopwatch
from fxsplit.schedule import Schedule, simulate
from fxsplit.schedule.memory import memory
from fxsplit.schedule.of_plan import footprints_of, times_of
from fxsplit.schedule.timeline import Timeline
from fxsplit.torch_internals.containers import HOOKS

Build = Callable[[Sequence[Any], Mapping[str, Any], Program | None], Program]
"""Compiles the model in its present mode for a call, given the program of the other mode if there is one."""


MOST_SHAPES = 16
"""Of a model that is exported for each shape anew, so many besides the first."""


class Pipeline(nn.Module):
    """A model run as a pipeline of stages.

    Parameters, buffers, submodules, hooks and mode are the model's own (the very same dictionaries), so state_dict(),
    parameters(), train(), eval() and optimizers see the unsplit model. Calling it equals calling the model on each
    microbatch and joining the outputs; `step` also runs loss and backward, in the schedule chosen.
    """

    _model: nn.Module
    _build: Build
    _fixed_microbatches: int | None
    _loss_fn: LossFn | None
    _programs: dict[bool, Program]
    _attributes: dict[bool, dict[str, str]]
    _compiled_modules: list[int]
    _compiling: threading.RLock
    _engine: Engine | None
    _closed: bool
    _process: int
    _weights: WeightFiles | None

    def __init__(
        self,
        model: nn.Module,
        build: Build,
        n_microbatches: int | None,
        loss_fn: LossFn | None,
        weights: WeightFiles | None = None,
    ) -> None:
        super().__init__()
        for key in nn.Module().__dict__.keys() - {"training", "_is_full_backward_hook"}:
            self.__dict__[key] = model.__dict__[key]
        # Past nn.Module's own attribute handling, which would register the model as a submodule.
        self.__dict__ |= {"_model": model, "_build": build, "_fixed_microbatches": n_microbatches, "_loss_fn": loss_fn}
        self.__dict__ |= {"_programs": {}, "_attributes": {}, "_compiled_modules": [], "_compiling": threading.RLock()}
        self.__dict__ |= {"_engine": None, "_closed": False, "_process": os.getpid(), "_weights": weights}

    # What the module is

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return bool(self.__dict__["_model"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "_model" in self.__dict__:  # nn.Module.__init__ sets it too, and must not change the model
            self.__dict__["_model"].training = mode

    @property
    def _is_full_backward_hook(self) -> bool | None:
        """Which kind of backward hooks the model itself has; torch asks the module that is called."""
        full: bool | None = self.__dict__["_model"]._is_full_backward_hook if "_model" in self.__dict__ else None
        return full

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, full: bool | None) -> None:
        if "_model" in self.__dict__:
            self.__dict__["_model"]._is_full_backward_hook = full

    def train(self, mode: bool = True) -> Pipeline:
        """Set the mode as the model itself does, which may keep parts of it in evaluation."""
        self._model.train(mode)
        return self

    @property
    def plan(self) -> Plan:
        """The plan of the present mode (or of the other, where only that is compiled); print it."""
        return self._present().plan

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
        return self._present().stages

    @property
    def ir(self) -> IR:
        """The IR after the last pass."""
        return self._present().final

    @property
    def model(self) -> nn.Module:
        """The unsplit model, whose parameters, buffers, modules and hooks are this pipeline's."""
        return self._model

    @property
    def build(self) -> Build:
        """What compiles this pipeline."""
        return self._build

    @property
    def traced(self) -> IR:
        """The IR before the first pass: the captured graph, and the Example that it was captured with."""
        return self._present().traced

    @property
    def front_end(self) -> str:
        """How the model became a graph: symbolic_trace (perhaps with submodules kept whole), export or graph_module."""
        return self.traced[Scope].front_end

    @property
    def from_shapes(self) -> bool:
        """Whether the model was captured by its shapes alone, in any mode."""
        return any(program.traced[Example].from_shapes for program in self._programs.values())

    def call_of(self, *args: Any, **kwargs: Any) -> tuple[Inputs, list[int]]:
        """Return how a call's arguments are cut, and the rows of each microbatch."""
        program, _, rows = self._prepare(args, kwargs)
        return program.inputs, rows

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the unsplit model's state_dict."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state_dict of the unsplit model."""
        result = self._model.load_state_dict(state_dict, strict=strict, assign=assign)
        for program in self._programs.values():
            for each in (program, *program.others.values()):
                each.place()
        return result

    def load_weights(self, path: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Load a safetensors checkpoint, each tensor straight to the device of its stage, one after another.

        path: a .safetensors file, an index (.safetensors.index.json) beside its files, or the folder of either, with
        the names and dtypes of the model's state_dict. Parameters stay the same objects, those on the meta device too.

        Raises InputError, before anything is loaded, for what is missing, of another shape or dtype, or, if `strict`,
        too much.
        """
        files = WeightFiles(path)
        if not self._programs:
            raise InputError(
                "this pipeline compiles on its first call, and its weights have no places yet: compile with "
                "example_inputs=, or give the checkpoint as compile(weights=path)"
            )
        files.load(self._model, self._present().placed(), strict)

    def __repr__(self) -> str:
        name = type(self._model).__name__
        if not self._programs:
            return f"Pipeline({name}, compiles on its first call)"
        return f"Pipeline({name})\n{self.plan}"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise FxsplitError("a pipeline cannot be copied, it has threads: copy the model and compile the copy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise FxsplitError("a pipeline cannot be pickled, it has threads: save pipe.state_dict() instead")

    # What it does

    def compile_for(self, *args: Any, **kwargs: Any) -> None:
        """Compile the present mode for calls like this one, unless it is compiled already."""
        self._program(args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns, computed microbatch by microbatch; differentiable."""
        program, tensors, rows = self._prepare(args, kwargs)
        return program.result(self._workers(program).forward(program, tensors, rows))

    def step(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = False,
        optimizer: Optimizer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one training step in the pipeline's schedule; add gradients to `.grad`; return the loss, detached.

        `target` is a tensor, or tuple or dict of tensors, with one row for each row of the input. Without a loss_fn the
        loss is the one that the model itself returns, as Hugging Face's models do for `labels=`. The loss is that of
        the whole batch: microbatches are weighted by their rows, or summed where `loss_fn.reduction` is "sum". With
        `return_outputs` the result is (loss, outputs), both detached. No `.grad` changes when a step fails.

        Under PipeDream and PipeDream-2BW the batch is a stream, and `optimizer` steps as its microbatches come back:
        after each of them, or after each n_devices of them, whose mean loss is then what that step minimises. It
        starts by setting every `.grad` to None. One that fails has stepped as far as it came.
        """
        program, loss, outputs, _ = self._step(args, kwargs, target, return_outputs, None, optimizer)
        return (loss.compute_total(), program.result(outputs)) if return_outputs else loss.compute_total()

    def trace(
        self, *args: Any, target: Any = None, optimizer: Optimizer | None = None, **kwargs: Any
    ) -> tuple[Timeline, Timeline]:
        """Run one training step as `step` does; return what every device did when, and what the plan predicts.

        Both are timelines for `fxsplit.report`: `save_picture([predicted, measured], "step.svg")`, `save_trace` for
        Perfetto, `draw` for the terminal. The first steps are slower than later ones: trace one of those.
        """
        program, _, _, watch = self._step(args, kwargs, target, False, Stopwatch, optimizer)
        assert watch is not None
        schedule = watch.schedule
        simulation = simulate(schedule, times_of(program.plan, schedule))
        names = tuple(d.name for d in program.machine.devices[: schedule.n_devices])
        predicted = Timeline.of(simulation, names, memory(simulation, footprints_of(program.plan)))
        return watch.make_timeline(names), replace(predicted, title=f"{schedule.name}, predicted")

    def _step(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        target: Any,
        keep: bool,
        watching: Callable[[Schedule], Stopwatch] | None,
        optimizer: Optimizer | None,
    ) -> tuple[Program, BatchLoss, list[Any], Stopwatch | None]:
        """Run one training step."""
        if self._loss_fn is None and target is not None:
            raise InputError(
                "step() needs a loss: compile with loss_fn=, for example "
                "fxsplit.compile(model, 2, loss_fn=torch.nn.functional.cross_entropy)"
            )
        if self._loss_fn is not None and target is None:
            raise InputError("step() needs the target of its loss by name: pipe.step(x, target=y)")
        if not torch.is_grad_enabled():
            raise InputError("step() under no_grad has no gradients to compute: call pipe(x) to evaluate")
        if any(self.__dict__[kind] for kind in HOOKS):
            raise InputError("the model itself has hooks, which step() would not run: remove them, or call pipe(x)")
        program, tensors, rows = self._prepare(args, kwargs)
        if any(t.requires_grad for t in tensors):
            raise InputError(
                "an input of step() wants a gradient, which step() does not return: call pipe(x) and backward()"
            )
        schedule = program.schedule(len(rows))
        stepper = make_stepper(schedule, optimizer)
        targets = None if self._loss_fn is None else split_target(target, rows, program.inputs)
        loss = BatchLoss(self._loss_fn or take_model_loss, targets, rows, schedule.steps)
        watch = None if watching is None else watching(schedule)
        return program, loss, self._workers(program).step(program, tensors, rows, loss, keep, watch, stepper), watch

    def close(self) -> None:
        """End the worker threads; the pipeline cannot run afterwards. Also done with the last reference to it."""
        self.__dict__["_closed"] = True
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Program, list[Tensor], list[int]]:
        """Return the program for a call, its tensors, and the rows of each microbatch."""
        program = self._program(args, kwargs)
        floating = (p.dtype for p in self._model.parameters() if p.is_floating_point())
        program.relink()
        program.check_weights()
        tensors = program.inputs.bind(args, kwargs, next(floating, None))
        program = self._for_shapes(program, args, kwargs, tensors)
        batch = program.inputs.rows(tensors)
        count = self._fixed_microbatches
        if count is None and program.n_microbatches is not None and program.n_microbatches <= batch:
            count = program.n_microbatches
        if count is None:
            count = program.scheduler.nearest(choose_count(batch, program.scheduler.n_devices))
        rows = divide_rows(batch, count)
        program.traced[CallEffects].check_cut(len(rows))
        program.traced[Scope].check_rows(rows)
        return program, tensors, rows

    def _for_shapes(
        self, program: Program, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
    ) -> Program:
        """Return the program for a call's shapes: a graph that was exported is for one, and others are compiled too."""
        shapes = program.traced[Scope].other_shapes(tensors)
        if shapes is None:
            return program
        with self._compiling:
            if shapes not in program.others:
                if len(program.others) == MOST_SHAPES:
                    raise InputError(
                        f"the model could only be exported, which makes a graph for every shape, and {shapes} (without "
                        f"rows) is more than {MOST_SHAPES + 1} of them: pad to fewer shapes"
                    )
                made = self._build(args, kwargs, program)
                made.place()
                if made.alone:  # its weights are elsewhere now
                    self._programs.clear()
                    self._programs[self.training] = made
                program.others[shapes] = made
            return program.others[shapes]

    def _program(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Program:
        """Return the program of the present mode, compiled on the first call in it."""
        if self._closed:
            raise ClosedError("the pipeline is closed: compile the model again")
        if self._process != os.getpid():
            raise ClosedError("the pipeline's threads stayed in the process that forked: compile again")
        with self._compiling:
            modules = [id(m) for m in self._model.modules()]
            if modules != self._compiled_modules:  # a submodule was replaced: what was compiled is of another model
                self._programs.clear()
                self._compiled_modules[:] = modules
            present = self._programs.get(self.training)
            if present is None or self._outdated(present):
                program = self._build(args, kwargs, self._programs.get(not self.training) or present)
                if program.alone:
                    self._programs.clear()
                program.place()
                if self._weights is not None:
                    self._weights.load(self._model, program.placed(), strict=True)
                    self.__dict__["_weights"] = None
                self._programs[self.training] = program
                self._attributes[self.training] = program.attributes()
            program = self._programs[self.training]
        program.check_hooks()
        return program

    def _outdated(self, program: Program) -> bool:
        """Return whether an attribute that tracing may have made a constant of has another value now; says which."""
        before, now = self._attributes[self.training], program.attributes()
        changed = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
        numbers = [name for name in changed if not name.endswith("training")]
        if numbers:
            name = numbers[0]
            warnings.warn(
                f"compiling again, because attribute {name!r} of the model changed from {before.get(name)} to "
                f"{now.get(name)}: keep what forward() does not read, such as counters, outside of the model",
                stacklevel=5,
            )
        return bool(changed)

    def _workers(self, program: Program) -> Engine:
        """Return the engine, started for the first batch; both modes run on the same machine."""
        with self._compiling:
            if self._engine is None:
                devices = program.machine.torch_devices()
                self.__dict__["_engine"] = Engine(devices, program.machine.intraop_threads())
            assert self._engine is not None
            return self._engine

    def _present(self) -> Program:
        """Return a program to look at."""
        program = self._programs.get(self.training) or self._programs.get(not self.training)
        if program is None:
            raise InputError("nothing is compiled yet: call the pipeline once, or pass example_inputs= to compile()")
        return program
