"""Compile the program that runs a call of a model, on the first such call, and keep it.

A compile chooses a candidate ("auto"), captures the graph, states the facts, runs the chain of passes and builds the
program (lowering.py). Then the weights move to the devices of their stages.

A *record* (Compiled) is a program with the facts that it was made from. Records are kept by mode, shapes, and the *way*
in which the model is called: which of its arguments are tensors.

  _kept: (mode, number of the way, shapes) -> record

    ("train", 1, None)    first program of the mode and way; right for all shapes, unless the graph was exported
    ("train", 1, shapes)  a program for other shapes of an exported graph
    ("eval",  1, None)    often the same program as in training
    ("train", 2, None)    another way of calling the model, such as with labels
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fxsplit.api.compiler.compile_group import CompileGroup, make_compile_group
from fxsplit.api.compiler.compiled import OTHER_MODE, Compiled, read_versions
from fxsplit.api.compiler.heavy_modules import warn_of_heavy_module
from fxsplit.api.compiler.lowering import build_program, capture_model, read_stated
from fxsplit.api.compiler.microbatch_count import AUTO
from fxsplit.api.compiler.options import CompileOptions
from fxsplit.api.compiler.stage_search import Pin, StageSearch
from fxsplit.api.compiler.validity import ModuleWatch, Validity
from fxsplit.errors import InputError, NoFit, UnsteadyProfileWarning
from fxsplit.formats.weights.checkpoint_names import Extra
from fxsplit.formats.weights.safetensors_files import WeightFiles
from fxsplit.frontend.other_shapes import fit_to_shapes
from fxsplit.frontend.restore.no_trace_left import restore_model
from fxsplit.ir.dump import make_observers
from fxsplit.ir.dump_folder import DumpFolder
from fxsplit.ir.facts.capture.call import Call, FlatCall, Inputs, TensorSpec, flatten_call
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.capture.number_arguments import is_taken
from fxsplit.ir.facts.capture.numbers import name_candidates
from fxsplit.ir.facts.capture.scope import Scope, Shapes
from fxsplit.ir.graph import IR, Mode
from fxsplit.ir.manager import Observer
from fxsplit.ir.observers import Reproducer
from fxsplit.passes import Leaf
from fxsplit.runtime.microbatches import divide_rows
from fxsplit.runtime.program import Batch, Program
from fxsplit.system.interrupts import raise_lost_interrupt
from fxsplit.system.logs import emit
from fxsplit.system.progress_bar import show_progress
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.autograd.leaves import hide_gradients
from fxsplit.torch_internals.random.seeded_calls import lend_draws
from fxsplit.torch_internals.scopes.undo import CallerLock, restores_all
from fxsplit.torch_internals.thread_modes import cast_in_place, enable_gradients, leave_saved_hooks

MOST_WAYS = 16
"""The most ways of calling a model, such as with and without labels, that programs are kept for."""
MOST_SHAPES = 16
"""The most programs for other shapes that are kept, if the model must be exported again for each shape."""
MOST_FITTED = 1000
"""The most shapes that are remembered as right for the first program."""
MOST_REASONS = 3
"""The most changed values that the log record of a compile names."""
MOST_OUTDATED = 4
"""The most programs kept for earlier Python values, which may return, as modes of torch do after an evaluation."""


def get_mode(model: nn.Module) -> Mode:
    """Return the mode of a model."""
    return "train" if model.training else "eval"


class Compiler:
    """Compiles one model with one set of options: a program for each mode and way of calling it, on one set of weights.

    Two calls are made in the same way if the same arguments are tensors, the same are None, and there is the same
    number of them: see `Inputs.is_way`. A record is kept under (mode, number of the way, shapes). The first program of
    a mode has shapes=None: it is right for all shapes unless its graph was exported. Every weight is on the same stage
    in all programs.
    """

    def __init__(
        self,
        model: nn.Module,
        options: CompileOptions,
        weights: WeightFiles | None = None,
        *,
        from_shapes: bool = False,
        compile_group: CompileGroup | None = None,
    ) -> None:
        self.model = model
        self.options = options
        self.weights = weights  # read when the first mode is compiled; None after that
        self._from_shapes = from_shapes
        self._kept: dict[tuple[Mode, int, Shapes | None], Compiled] = {}
        self._ways: dict[int, Inputs] = {}  # by number, the oldest first
        self._n_ways = 0
        self._signature: inspect.Signature | None = None
        # Records for Python values that have changed since, such as modes of torch. The latest is last.
        self._outdated: deque[tuple[Mode, int, Compiled]] = deque(maxlen=MOST_OUTDATED)
        self._modules = ModuleWatch(model)
        self._said_fewer = False
        self._folder: DumpFolder | None = None
        self.compile_group = compile_group  # the ranks that run the pipeline; None for one process
        self._turn = CallerLock(lend_draws)  # the first calls of several threads must compile only once
        self.pin: Pin = lambda captured: captured
        # Returns a block in which no batch runs. Before the first batch there is nothing to stop.
        self.pause: Callable[[], AbstractContextManager[None]] = nullcontext

    @restores_all
    def program(self, mode: Mode, call: Call) -> Program:
        """Return the program that runs `call` in `mode`, the model's present mode; compile it if there is none."""
        return self._find(mode, call, self._flatten(call)).program

    @restores_all
    def prepare(self, mode: Mode, call: Call) -> Batch:
        """Return a batch that is ready to run: the program of a call, its tensors, and the rows of each microbatch.

        Raises InputError if the program cannot run the call, or if the batch has too few rows for its microbatches.
        """
        flat = self._flatten(call)
        compiled = self._find(mode, call, flat)
        # A parameter may have been replaced since the last call, by load_state_dict(assign=True) for example.
        compiled.validity.relink()
        compiled.validity.check_weights()
        program, inputs = compiled.program, compiled.inputs
        tensors = self._bind(inputs, flat)
        rows = program.inputs.count_rows(tensors)
        divided = compiled.divided.get(rows)
        if divided is None:
            divided = compiled.divided[rows] = self._divide(compiled, rows)
        arguments = {name: now for name, (_, now) in inputs.find_numbers(*call).items()} if inputs.numbers else {}
        return Batch(program, tensors, divided, compiled.python_state.read_numbers(arguments))

    def _divide(self, compiled: Compiled, rows: int) -> list[int]:
        """Return the rows of each microbatch of a batch of `rows` rows.

        Raises InputError for too few rows, or for microbatches for which forward() would take another branch.
        """
        count = compiled.adapt_candidate(self.options, rows).n_microbatches
        self._say_fewer(rows, count)
        divided = divide_rows(rows, count)
        compiled.scope.check_rows(divided)
        return divided

    def _say_fewer(self, rows: int, count: int) -> None:
        """Warn, once, if a batch has fewer rows than the number of microbatches that the user stated."""
        stated = self.options.n_microbatches
        if isinstance(stated, int) and count < stated and not self._said_fewer:
            self._said_fewer = True
            warn_user(
                f"a batch of {rows} rows is cut into {count} microbatches, and not into n_microbatches={stated}: give "
                f"at least {stated} rows (a DataLoader's last batch: drop_last=True) for the plan to hold"
            )

    def get_compiled(self, mode: Mode) -> Compiled | None:
        """Return the first record of a mode, or of the other mode if only that is compiled.

        If the model is called in several ways, return the record of the first.
        """
        for wanted in (mode, OTHER_MODE[mode]):
            ways = [way for known, way, shapes in self._kept if known == wanted and shapes is None]
            if ways:
                return self._kept[wanted, min(ways), None]
        return None

    def list_programs(self) -> list[Program]:
        """Return each program once. All programs have a weight on the same stage."""
        kept = [*self._kept.values(), *(compiled for *_, compiled in self._outdated)]
        return [*{id(compiled.program): compiled.program for compiled in kept}.values()]

    def list_placed(self) -> list[tuple[Tensor, torch.device]]:
        """Return each parameter and buffer of this process that some program reads, with the device it belongs on."""
        placed = {id(w): (w, device) for program in self.list_programs() for w, device in program.list_placed()}
        return [*placed.values()]

    @restores_all
    def place_all(self) -> None:
        """Move the weights, which may have been replaced, to the devices of their stages."""
        for compiled in self._kept.values():
            self._place(compiled)

    def _place(self, compiled: Compiled) -> None:
        """Move the weights of a compiled program to its devices; over ranks, keep those that other programs need."""
        others = [] if compiled.moves_weights else self.list_programs()
        compiled.place(self.model, self.compile_group, others)

    def recompile_like(self, model: nn.Module, options: CompileOptions) -> Compiler:
        """Return a compiler for another model, which captures it by shapes only if this compiler did."""
        from_shapes = any(compiled.captured[Example].from_shapes for compiled in self._kept.values())
        world = self.compile_group.world if self.compile_group else None
        return Compiler(model, options, from_shapes=from_shapes, compile_group=make_compile_group(world, options))

    def _find(self, mode: Mode, call: Call, flat: FlatCall) -> Compiled:
        """Return the record for a call, and compile it if there is none. Raises InputError for unusable hooks."""
        with self._turn.take():
            # A submodule was replaced, so every program is of the old model.
            if self._modules.find_replaced():
                if self._kept:
                    name = type(self.model).__name__
                    emit("recompiles", "recompile", f"compile {name} again: a submodule was replaced", model=name)
                self._kept.clear()
                self._outdated.clear()
                self._ways.clear()
                self._signature = None
            way = self._find_way(flat)
            first = self._kept.get((mode, way, None))
            if first is None or self._is_outdated(first, call):
                # A compile runs the model and then restores it, so buffers that a running batch writes meanwhile would
                # be lost. The compile may also move weights.
                with self.pause():
                    first = self._find_again(mode, way, call) or self._compile_way(mode, way, call, outdated=first)
        first.validity.check_hooks()
        # Only an exported graph is for one shape. For other models `prepare` binds the call, once.
        if not first.scope.fixed:
            return first
        shapes = first.scope.other_shapes(self._bind(first.inputs, flat))
        return first if shapes is None else self._find_for_shapes(mode, way, call, shapes, first)

    def _flatten(self, call: Call) -> FlatCall:
        """Return a call as one flat list of values, in the order of the parameters of forward()."""
        if self._signature is None:
            self._signature = inspect.signature(self.model.forward)
        return flatten_call(self._signature, *call)

    def _find_way(self, flat: FlatCall) -> int:
        """Return the number of the way in which a call is made, or a new number."""
        way = next((way for way, inputs in self._ways.items() if self._is_way(inputs, flat)), None)
        if way is not None:
            return way
        self._n_ways += 1
        return self._n_ways

    def _is_way(self, inputs: Inputs, flat: FlatCall) -> bool:
        return inputs.is_way(flat, self._read_dtype(), self._kinds)

    def _keep_way(self, way: int, compiled: Compiled) -> None:
        """Remember how calls of a way are made. Beyond MOST_WAYS, forget the oldest, but keep the first."""
        self._ways.setdefault(way, compiled.inputs)
        forgotten = [*self._ways][1 : 1 + max(len(self._ways) - MOST_WAYS, 0)]
        if forgotten:
            warn_user(
                f"{type(self.model).__name__} is called in more than {MOST_WAYS} ways, each of which compiles, and the "
                f"way ({self._ways[forgotten[0]].describe()}) is forgotten: pass values that change often to forward() "
                "as tensors or numbers"
            )
        for key in [key for key in self._kept if key[1] in forgotten]:
            del self._kept[key]
        for old in forgotten:
            del self._ways[old]

    def _find_again(self, mode: Mode, way: int, call: Call) -> Compiled | None:
        """Return a kept record for the present Python values, and make it the first again; None if there is none."""
        known = (c for c in self._outdated if c[:2] == (mode, way))
        found = next((c for c in known if not self._is_outdated(c[2], call)), None)
        if found is None:
            return None
        self._outdated.remove(found)
        self._keep_first(*found)
        return found[2]

    def _keep_first(self, mode: Mode, way: int, compiled: Compiled) -> None:
        """Make a record the first of its mode and way. Keep the one before: its Python values may return."""
        # An interrupt that was lost may have sent the capture another way through the model.
        raise_lost_interrupt()
        replaced = self._kept.get((mode, way, None))
        if compiled.moves_weights:
            self._outdated.clear()
        elif replaced is not None:
            self._outdated.append((mode, way, replaced))
        # Programs for other shapes go too: they were compiled for the same Python values as the replaced program.
        self._kept = {k: c for k, c in self._kept.items() if k[:2] != (mode, way) and not compiled.moves_weights}
        self._place(compiled)
        self._kept[mode, way, None] = compiled
        self._keep_way(way, compiled)

    def _find_for_shapes(self, mode: Mode, way: int, call: Call, shapes: Shapes, first: Compiled) -> Compiled:
        """Return the record for shapes other than the example's: an exported graph is right only for its own shapes."""
        with self._turn.take():
            kept = self._kept.get((mode, way, shapes))
            # With other shapes forward() may take another branch and read other values. A record that shares the first
            # program shares its values, which `_find` has checked.
            if kept is not None and (kept.validity is first.validity or not self._is_outdated(kept, call)):
                self._kept[mode, way, shapes] = self._kept.pop((mode, way, shapes))  # now the last to be forgotten
                return kept
            # If both modes share the first program, they also share the programs for other shapes.
            other = self._kept.get((OTHER_MODE[mode], way, None))
            if other is not None and other.program is first.program and (OTHER_MODE[mode], way, shapes) in self._kept:
                return self._kept[OTHER_MODE[mode], way, shapes]
            # The model is run and then restored, so buffers that a running batch writes meanwhile would be lost.
            with self.pause():
                compiled = self._fit(call, first)
                if compiled is None:
                    with self._log_compile(mode, "it was exported for other shapes"):
                        compiled = self._compile(call, first, outdated=kept)
                raise_lost_interrupt()
                self._place(compiled)
            # The weights have moved, so all other programs would look for them on the wrong devices.
            if compiled.moves_weights:
                self._kept = {(mode, way, None): compiled}
            else:
                self._keep_for_shapes(mode, way, shapes, compiled)
            return compiled

    def _fit(self, call: Call, first: Compiled) -> Compiled | None:
        """Return a record for the shapes of another call; None if the captured graph is wrong for them."""
        inputs, tensors = Inputs.of(self.model, *call, self.options.chunks)
        count = first.adapt_candidate(self.options, inputs.count_rows(tensors)).n_microbatches
        rows = divide_rows(inputs.count_rows(tensors), count)
        from_shapes = first.captured[Example].from_shapes

        def fit() -> IR | None:
            with enable_gradients(), cast_in_place(self._kinds, tensors, self._read_dtype()):
                return fit_to_shapes(first.captured, self.model, call, rows, read_stated(self.options))

        captured = (
            fit() if self.compile_group is None else self.compile_group.fit(self.model, fit, from_shapes=from_shapes)
        )
        return None if captured is None else replace(first, captured=captured)

    def _keep_for_shapes(self, mode: Mode, way: int, shapes: Shapes, compiled: Compiled) -> None:
        """Keep a record for its shapes; beyond the limits, forget the oldest."""
        self._kept[mode, way, shapes] = compiled
        # A record that shares the first program is small. A program of its own holds stages and measurements.
        first = self._kept[mode, way, None].program
        known = [(key, c) for key, c in self._kept.items() if key[:2] == (mode, way) and key[2]]
        for most, own in ((MOST_SHAPES, True), (MOST_FITTED, False)):
            alike = [key for key, c in known if (c.program is not first) == own]
            for key in alike[:-most]:
                del self._kept[key]

    def _compile_way(self, mode: Mode, way: int, call: Call, outdated: Compiled | None) -> Compiled:
        """Return a mode compiled for a call of a way, as `_compile_first` does.

        Raises InputError if a tensor has another dtype or number of dimensions than in a known way, and the model fails
        on it.
        """
        try:
            return self._compile_first(mode, way, call, outdated)
        except Exception as error:
            # A tensor of another dtype is the usual reason, and the model's own error says less about it.
            misfit = None if way in self._ways else self._find_misfit(call)
            if misfit is None:
                raise
            raise misfit from error

    def _find_misfit(self, call: Call) -> InputError | None:
        """Return an error for a call that differs from a known way only in the dtype or dimensions of a tensor."""
        flat = self._flatten(call)
        _, values, structure, _ = flat
        for inputs in self._ways.values():
            pairs = [*zip(inputs.leaves, values, strict=True)] if structure == inputs.structure else []
            if pairs and all(isinstance(v, Tensor) if isinstance(s, TensorSpec) else is_taken(s, v) for s, v in pairs):
                try:
                    self._bind(inputs, flat)
                except InputError as error:
                    return error
        return None

    def _compile_first(self, mode: Mode, way: int, call: Call, outdated: Compiled | None) -> Compiled:
        """Compile the model in its present mode for a call, move its weights to their devices, and keep the record.

        The record becomes `_kept[mode, way, None]`. outdated: the record that it replaces, since Python values, weights
        or the need of gradients have changed; None if there was none.
        Raises InputError if forward() reads a Python value that differs between this call and the capture of the graph.
        """
        hopeful = set() if outdated is None else name_candidates(outdated.captured, *call)
        said = outdated is None or self._announce(outdated, call, hopeful)
        like = self._kept.get((OTHER_MODE[mode], way, None)) or outdated or self.get_compiled(mode)
        try:
            with self._log_compile(mode, self._explain_compile(mode, call, like, outdated)):
                compiled = self._compile(call, like, outdated)
            if not self._kept:
                # Submodules that forward() makes on its first call are in the graph: take them as known.
                self._modules.find_replaced()
        except NoFit as error:
            if mode == "eval" and self._wants_gradients(call):
                error.add_note("without gradients it may fit: call or compile under torch.no_grad(), or inference=True")
            raise
        if outdated is not None and not said:
            self._announce(outdated, call, {n.place.name for n in compiled.python_state.followed})
        for name, (then, now) in compiled.validity.find_changes().items():
            raise InputError(
                f"forward() reads {name}, which is {now} in this call and {then} whenever a graph is made: decide "
                "outside of forward(), and pass the decision as an argument"
            )
        self._keep_first(mode, way, compiled)
        if self.weights is not None:
            # The model was built without values, and they can be read now that each weight has a device.
            self.weights.load(self.model, compiled.program.list_placed(), Extra.WARN)
            self.weights = None
        return compiled

    def _explain_compile(self, mode: Mode, call: Call, like: Compiled | None, outdated: Compiled | None) -> str | None:
        """Return why a call must compile although the model was compiled before; None for the first compile."""
        if like is None:
            return None
        if outdated is None:
            known = any(kept == mode for kept, _, _ in self._kept)
            return "it is called in another way" if known else f"it is called in {mode} mode for the first time"
        weight = outdated.find_changed_weight(self.model)
        changes = [f"{name} changed from {a} to {b}" for name, (a, b) in self._find_changes(outdated, call).items()]
        if weight is not None:
            changes.insert(0, f"weight {weight!r} has changed")
        return ", ".join(changes[:MOST_REASONS]) or "it was compiled for inference, and this call trains"

    @contextmanager
    def _log_compile(self, mode: Mode, reason: str | None) -> Iterator[None]:
        """Log the compile in the block. reason: why the model is compiled again; None for its first compile."""
        name, begin = type(self.model).__name__, time.perf_counter()
        if reason is not None:
            message = f"compile {name} again: {reason}"
            emit("recompiles", "recompile", message, model=name, mode=mode, reason=reason)
        yield
        seconds = time.perf_counter() - begin
        message = f"compiled {name} for {mode} mode in {seconds:.3f} s"
        emit("compiles", "compile", message, model=name, mode=mode, seconds=seconds, reason=reason)

    def _compile(self, call: Call, like: Compiled | None, outdated: Compiled | None) -> Compiled:
        """Return the model's present mode, compiled for a call.

        like: an earlier record, for the other mode, other shapes or another way of calling the model. Its stages are
            shared if the graph is the same. Otherwise every weight stays on the stage that it has in all existing
            programs.
        outdated: the record that was right for this call before something changed. It may be `like`.
        """
        inputs, tensors = Inputs.of(self.model, *call, self.options.chunks)
        # First of all: an unusable dump folder is refused before anything is measured.
        observers = self._make_observers(inputs, tensors)
        rows = inputs.count_rows(tensors)
        from_shapes = self._from_shapes or (like is not None and like.captured[Example].from_shapes)
        capture_rows = partial(
            capture_model,
            self.model,
            self.options,
            call,
            from_shapes=from_shapes,
            grad_enabled=torch.is_grad_enabled(),
            earlier=[known.captured for known in (outdated, like) if known is not None],
        )
        options, moves_weights = self._choose_options(call, like)
        like = None if moves_weights else like
        same_way = like is not None and self._is_way(like.inputs, self._flatten(call))
        others = [] if like is None else self.list_programs()
        search = StageSearch(
            self.model, options, rows, capture_rows, self.pin, like, same_way, others, moves_weights, observers
        )
        shapes = f"({inputs.describe()}) of {[(t.dtype, tuple(t.shape)) for t in tensors]}"
        group = self.compile_group
        joint = nullcontext() if group is None else group.meet(options, self.model, shapes, from_shapes=from_shapes)
        with joint, self._run_for_compile(tensors):
            found = search.find() if group is None else search.find_together(group)
            candidate, captured, final, costs = found.candidate, found.captured, found.final, found.costs
            if final is None:
                assert like is not None, "a shared program was compiled before"
                return like.share(self.model, get_mode(self.model), captured)
        if like is None and "kept whole" not in captured[Scope].front_end:  # "kept whole" has had a warning
            warn_of_heavy_module(captured, costs, [p.path for p in self.options.chain if isinstance(p, Leaf)])
        if like is None and costs is not None and costs.noise is not None:
            warn_user(costs.noise, UnsteadyProfileWarning)
        program = build_program(self.model, self.options, candidate, captured, final, self._find_here())
        if not found.moves_weights:
            program = program.live_with(others)
        return Compiled(
            captured=captured,
            final=final,
            costs=costs,
            program=program,
            validity=Validity(self.model, captured, program.stages),
            found_count=candidate.n_microbatches if self.options.n_microbatches == AUTO else None,
            moves_weights=found.moves_weights,
            versions={} if program.detached is None else read_versions(self.model),
        )

    def keep_compiled(self, compiled: Compiled) -> None:
        """Keep a record that was made elsewhere as the first of its mode, and move the weights to its devices."""
        with self._turn.take():
            self._n_ways += 1
            self._modules.find_replaced()
            self._keep_first(compiled.captured.mode, self._n_ways, compiled)

    def _find_here(self) -> frozenset[int] | None:
        """Return the devices that run in this process; None for all of them."""
        return None if self.compile_group is None else frozenset([self.compile_group.world.me])

    def _choose_options(self, call: Call, like: Compiled | None) -> tuple[CompileOptions, bool]:
        """Return the options for a call, and whether `like` cannot be used, as it is for inference and the call trains.

        If it cannot, all weights are planned again, since the stages of inference may lack the memory to train.
        """
        if self._wants_gradients(call):
            return self.options, like is not None and like.program.inference
        inference = like is None or like.program.inference
        return self.options.for_inference() if inference else self.options, False

    @contextmanager
    def _run_for_compile(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Run the model in the block in the modes it will run in, and restore it afterwards."""
        cast = cast_in_place(self._kinds, tensors, self._read_dtype())
        gradients = hide_gradients(self.model.parameters())
        # A module that stays whole may count its runs, so restore_model() puts its state back.
        with enable_gradients(), cast, leave_saved_hooks(), show_progress(), restore_model(self.model), gradients:
            yield

    def _make_observers(self, inputs: Inputs, tensors: Sequence[Tensor]) -> Sequence[Observer]:
        """Return the observers of passes for these inputs: for dumps and reproducers, and the user's own."""
        if not self.options.observed:
            return []
        self._folder = self._folder or DumpFolder(self.options.dump)
        shapes = inputs.drop_rows(t.shape for t in tensors)
        folder = self._folder.choose(type(self.model).__name__, get_mode(self.model), shapes)
        made = [*make_observers(folder, self.options.passes), *self.options.observers]
        if self.options.reproducer is not None:
            made.append(Reproducer(Path(self.options.reproducer)))
        return made

    def _is_outdated(self, compiled: Compiled, call: Call) -> bool:
        """Return whether Python values, or the weights that a pass made its own weights from, have changed.

        A record for inference is also outdated if the call needs gradients.
        """
        if compiled.program.inference and self._wants_gradients(call):
            return True
        # Nearly all programs hold the model's own weights, and then there is nothing to compare.
        other_weights = compiled.versions and compiled.find_changed_weight(self.model)
        return bool(other_weights or self._find_changes(compiled, call))

    def _wants_gradients(self, call: Call) -> bool:
        """Return whether outputs need gradients: they are switched on, and a parameter or input requires them."""
        if self.options.inference or not torch.is_grad_enabled():
            return False
        given = (t for t in pytree.tree_leaves(call) if isinstance(t, Tensor))
        return any(t.requires_grad for t in (*self.model.parameters(), *given))

    def _find_changes(self, compiled: Compiled, call: Call) -> dict[str, tuple[str, str]]:
        """Return the Python values and number arguments that have changed, in words: name -> (then, now)."""
        arguments = compiled.inputs.find_changes(*call)
        found = compiled.validity.find_changes()
        return found | {name: (repr(then), repr(now)) for name, (then, now) in arguments.items()}

    def _announce(self, outdated: Compiled, call: Call, followed: set[str]) -> bool:
        """Warn of a change that makes a record outdated and costs a compile; return whether there was a warning.

        followed: the names of changed numbers that will be inputs of the next graph, which need no warning.
        """
        weight = outdated.find_changed_weight(self.model)
        if weight is not None:
            warn_user(
                f"compiling again, because weight {weight!r} of the model has changed, and the pipeline is "
                f"{outdated.program.detached}: leave the pass out while weights change"
            )
            return True
        changes = self._find_changes(outdated, call)
        # A mode is changed on purpose. A number may be a counter, and each new value would cost a compile.
        modes = ("training' of the model", "is_grad_enabled()")
        silent = (name in followed or name.endswith(modes) for name in changes)
        name = next((name for name, quiet in zip(changes, silent, strict=True) if not quiet), None)
        if name is not None:
            then, now = changes[name]
            warn_user(
                f"compiling again, because {name} changed from {then} to {now}, and forward() reads it: pass a value "
                "that changes often to forward() as a tensor"
            )
        return name is not None

    def _bind(self, inputs: Inputs, flat: FlatCall) -> list[Tensor]:
        """Return the tensors of a call, cast to the model's dtype if need be. Raises InputError for a misfit."""
        return inputs.bind_flat(flat, self._read_dtype(), self._kinds)

    def _read_dtype(self) -> torch.dtype | None:
        """Return the dtype of the model's first floating-point parameter; None if it has none."""
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), None)

    @cached_property
    def _kinds(self) -> tuple[str, ...]:
        """The device types that stages run on, such as "cpu" and "cuda"."""
        devices = self.options.machine.devices
        return tuple(dict.fromkeys(d.torch_device.type for d in devices if d.torch_device is not None))
