"""Compiler: gives the program that runs a call, compiled on the first call in its mode, and kept.

The way of a model: choose a candidate (auto); capture its graph, state the facts, run the chain of passes and build the
program (lowering). Weights then move to the devices of their stages.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from fxsplit.api.compiler.compile_group import CompileGroup, make_compile_group
from fxsplit.api.compiler.compiled import OTHER_MODE, Compiled, get_mode, read_versions
from fxsplit.api.compiler.heavy_modules import warn_of_heavy_module
from fxsplit.api.compiler.lowering import build_program, capture_model, read_stated
from fxsplit.api.compiler.microbatch_count import AUTO
from fxsplit.api.compiler.module_watch import ModuleWatch
from fxsplit.api.compiler.options import CompileOptions
from fxsplit.api.compiler.stage_search import Pin, StageSearch
from fxsplit.api.compiler.validity import Validity
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
from fxsplit.ir.facts.capture.python_state import PythonState
from fxsplit.ir.facts.capture.scope import Scope, Shapes
from fxsplit.ir.graph import IR, Mode
from fxsplit.ir.manager import Observer
from fxsplit.passes import Leaf
from fxsplit.runtime.microbatches import divide_rows
from fxsplit.runtime.program import Batch, Program
from fxsplit.system.interrupts import raise_lost_interrupt
from fxsplit.system.progress_bar import show_progress
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.autograd.leaves import hide_gradients
from fxsplit.torch_internals.random.seeded_calls import lend_draws
from fxsplit.torch_internals.scopes.undo import CallerLock, restores_all
from fxsplit.torch_internals.thread_modes import cast_in_place, enable_gradients, leave_saved_hooks
from fxsplit.torch_internals.user_lines import warn_user

MOST_WAYS = 16
"""So many ways of calling a model are kept, such as with labels and without."""
MOST_SHAPES = 16
"""So many programs for other shapes are kept of a model that has to be exported for each shape anew."""
MOST_FITTED = 1000
"""So many shapes are remembered on which the first program is right."""
MOST_OUTDATED = 4
"""So many programs are kept for Python values that may return, as modes of torch do from training to evaluation."""


class Compiler:
    """Compiles one model with one set of options: a program for each mode and way of calling it, on one set of weights.

    A way of calling is which arguments are tensors, which are None and how many there are: see `Inputs.is_way`. What
    was compiled is kept by (mode, number of the way, shapes). Under (mode, way, None) is the first program of a mode,
    which is right for all shapes unless its graph was exported. All programs have a weight on the same stage.
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
        self.weights = weights  # to be read when the first mode is compiled, and None then
        self._from_shapes = from_shapes
        self._kept: dict[tuple[Mode, int, Shapes | None], Compiled] = {}
        self._ways: dict[int, Inputs] = {}  # by number; the last to be forgotten last
        self._n_ways = 0
        self._signature: inspect.Signature | None = None
        # Programs of values that forward() read and that are others now, such as modes of torch; the latest last.
        self._outdated: deque[tuple[Mode, int, Compiled]] = deque(maxlen=MOST_OUTDATED)
        self._modules = ModuleWatch(model)
        self._said_fewer = False
        self._folder: DumpFolder | None = None
        self.compile_group = compile_group  # the ranks that run the pipeline, where there are several
        self._turn = CallerLock(lend_draws)  # the first calls of several threads must not compile twice
        self.pin: Pin = lambda captured: captured
        # Lets nothing run in a block. Until there are workers, nothing does.
        self.pause: Callable[[], AbstractContextManager[None]] = nullcontext

    @restores_all
    def program(self, mode: Mode, call: Call) -> Program:
        """Return the program that runs `call` in a mode, which the model must be in; compile it if there is none."""
        return self._find(mode, call, self._flatten(call)).program

    @restores_all
    def prepare(self, mode: Mode, call: Call) -> Batch:
        """Return a call ready to run: its program, its tensors, and how many rows each microbatch has.

        Raises InputError for a call that the program is not made for, or that has too few rows for its microbatches.
        """
        flat = self._flatten(call)
        compiled = self._find(mode, call, flat)
        # A parameter may have been replaced since the last call, by load_state_dict(assign=True) for example.
        compiled.validity.relink()
        compiled.validity.check_weights()
        program = compiled.program
        inputs = compiled.captured[Example].inputs
        tensors = self._bind(inputs, flat)
        rows = program.inputs.count_rows(tensors)
        count = compiled.adapt_candidate(self.options, rows).n_microbatches
        self._say_fewer(rows, count)
        divided = divide_rows(rows, count)
        compiled.captured[Scope].check_rows(divided)
        arguments = {name: now for name, (_, now) in inputs.find_numbers(*call).items()} if inputs.numbers else {}
        return Batch(program, tensors, divided, compiled.captured[PythonState].read_numbers(arguments))

    def _say_fewer(self, rows: int, count: int) -> None:
        """Warn, once, of a batch whose rows do not suffice for the number of microbatches that the user stated."""
        stated = self.options.n_microbatches
        if isinstance(stated, int) and count < stated and not self._said_fewer:
            self._said_fewer = True
            warn_user(
                f"a batch of {rows} rows is cut into {count} microbatches, and not into n_microbatches={stated}: give "
                f"at least {stated} rows (a DataLoader's last batch: drop_last=True) for the plan to hold"
            )

    def get_compiled(self, mode: Mode) -> Compiled | None:
        """Return what was compiled first in a mode, or in the other mode where only that is compiled.

        Of several ways of calling the model it is the first.
        """
        for wanted in (mode, OTHER_MODE[mode]):
            ways = [way for known, way, shapes in self._kept if known == wanted and shapes is None]
            if ways:
                return self._kept[wanted, min(ways), None]
        return None

    def list_programs(self) -> list[Program]:
        """Return all programs that there are, each once; they agree on where each weight is."""
        kept = [*self._kept.values(), *(compiled for *_, compiled in self._outdated)]
        return [*{id(compiled.program): compiled.program for compiled in kept}.values()]

    def list_placed(self) -> list[tuple[Tensor, torch.device]]:
        """Return each parameter and buffer of this process that some program reads, with the device it belongs on."""
        placed = {id(w): (w, device) for program in self.list_programs() for w, device in program.list_placed()}
        return [*placed.values()]

    @restores_all
    def place_all(self) -> None:
        """Move the weights, which may be others now than before, to the devices of their stages."""
        for compiled in self._kept.values():
            self._place(compiled)

    def _place(self, compiled: Compiled) -> None:
        """Move the weights of one record to the devices of their stages; over ranks others stay where they are."""
        others = [] if compiled.moves_weights else self.list_programs()
        compiled.place(self.model, self.compile_group, others)

    def recompile_like(self, model: nn.Module, options: CompileOptions) -> Compiler:
        """Return a compiler for another model, which captures it by shapes alone where this one did."""
        from_shapes = any(compiled.captured[Example].from_shapes for compiled in self._kept.values())
        world = self.compile_group.world if self.compile_group else None
        return Compiler(model, options, from_shapes=from_shapes, compile_group=make_compile_group(world, options))

    def _find(self, mode: Mode, call: Call, flat: FlatCall) -> Compiled:
        """Return what is compiled for a call, after compiling it if need be; raises InputError for unusable hooks."""
        with self._turn.take():
            # All that was compiled is of another model then.
            if self._modules.find_replaced():
                self._kept.clear()
                self._outdated.clear()
                self._ways.clear()
                self._signature = None
            way = self._find_way(flat)
            first = self._kept.get((mode, way, None))
            if first is None or self._is_outdated(first, call):
                # A compile runs the model, which then is what it was before: what batches under way write would be
                # lost. And weights may move.
                with self.pause():
                    first = self._find_again(mode, way, call) or self._compile_way(mode, way, call, outdated=first)
        first.validity.check_hooks()
        # Only an exported graph is for one shape; calls of other models are bound once, in `prepare`.
        scope = first.captured[Scope]
        if not scope.fixed:
            return first
        shapes = scope.other_shapes(self._bind(first.captured[Example].inputs, flat))
        return first if shapes is None else self._find_for_shapes(mode, way, call, shapes, first)

    def _flatten(self, call: Call) -> FlatCall:
        """Return a call as one flat list of values, for what the model's forward() takes."""
        if self._signature is None:
            self._signature = inspect.signature(self.model.forward)
        return flatten_call(self._signature, *call)

    def _find_way(self, flat: FlatCall) -> int:
        """Return the number of the way in which a call is made; a new one where there is none yet."""
        way = next((way for way, inputs in self._ways.items() if self._is_way(inputs, flat)), None)
        if way is not None:
            return way
        self._n_ways += 1
        return self._n_ways

    def _is_way(self, inputs: Inputs, flat: FlatCall) -> bool:
        return inputs.is_way(flat, self._read_dtype(), self._kinds)

    def _keep_way(self, way: int, compiled: Compiled) -> None:
        """Remember how calls of a way are made; of many ways, those that were made last and the first one."""
        self._ways.setdefault(way, compiled.captured[Example].inputs)
        forgotten = [*self._ways][1 : 1 + max(len(self._ways) - MOST_WAYS, 0)]
        if forgotten:
            warn_user(
                f"{type(self.model).__name__} is called in more than {MOST_WAYS} ways, each of which compiles, and the "
                f"way ({self._ways[forgotten[0]].describe()}) is forgotten: hand what changes often to forward() as a "
                "tensor or a number"
            )
        for key in [key for key in self._kept if key[1] in forgotten]:
            del self._kept[key]
        for old in forgotten:
            del self._ways[old]

    def _find_again(self, mode: Mode, way: int, call: Call) -> Compiled | None:
        """Return what was compiled for the Python values that there are now, and make it the mode's first again."""
        known = (c for c in self._outdated if c[:2] == (mode, way))
        found = next((c for c in known if not self._is_outdated(c[2], call)), None)
        if found is None:
            return None
        self._outdated.remove(found)
        self._keep_first(*found)
        return found[2]

    def _keep_first(self, mode: Mode, way: int, compiled: Compiled) -> None:
        """Make a record the first of its mode and way; the one before may be right again, for values of then."""
        # What was made after an interrupt that was lost may be another way through the model.
        raise_lost_interrupt()
        replaced = self._kept.get((mode, way, None))
        if compiled.moves_weights:
            self._outdated.clear()
        elif replaced is not None:
            self._outdated.append((mode, way, replaced))
        # Programs of this mode for other shapes were made beside the one that was first, and are outdated with it.
        self._kept = {k: c for k, c in self._kept.items() if k[:2] != (mode, way) and not compiled.moves_weights}
        self._place(compiled)
        self._kept[mode, way, None] = compiled
        self._keep_way(way, compiled)

    def _find_for_shapes(self, mode: Mode, way: int, call: Call, shapes: Shapes, first: Compiled) -> Compiled:
        """Return what is compiled for other shapes than the example's: an exported graph is for its own alone."""
        with self._turn.take():
            kept = self._kept.get((mode, way, shapes))
            # Other shapes may take another way through forward(), which reads other values. A record of the first
            # program has no values of its own, and those have been looked at.
            if kept is not None and (kept.validity is first.validity or not self._is_outdated(kept, call)):
                self._kept[mode, way, shapes] = self._kept.pop((mode, way, shapes))  # the last to be forgotten
                return kept
            # Modes that share the first program share those for other shapes as well.
            other = self._kept.get((OTHER_MODE[mode], way, None))
            if other is not None and other.program is first.program and (OTHER_MODE[mode], way, shapes) in self._kept:
                return self._kept[OTHER_MODE[mode], way, shapes]
            # The model is run, and then is what it was before: what batches under way write would be lost.
            with self.pause():
                compiled = self._fit(call, first) or self._compile(call, first, outdated=kept)
                raise_lost_interrupt()
                self._place(compiled)
            # No other program finds its weights where it expects them then.
            if compiled.moves_weights:
                self._kept = {(mode, way, None): compiled}
            else:
                self._keep_for_shapes(mode, way, shapes, compiled)
            return compiled

    def _fit(self, call: Call, first: Compiled) -> Compiled | None:
        """Return the record of a mode for the shapes of another call, where its graph is the model there as well."""
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
        """Keep a record for shapes of its own; of many, those that were made last."""
        self._kept[mode, way, shapes] = compiled
        # Records of one program cost little, and programs of their own hold stages and what was measured.
        first = self._kept[mode, way, None].program
        known = [(key, c) for key, c in self._kept.items() if key[:2] == (mode, way) and key[2]]
        for most, own in ((MOST_SHAPES, True), (MOST_FITTED, False)):
            alike = [key for key, c in known if (c.program is not first) == own]
            for key in alike[:-most]:
                del self._kept[key]

    def _compile_way(self, mode: Mode, way: int, call: Call, outdated: Compiled | None) -> Compiled:
        """Return a mode compiled for a call of a way, as `_compile_first` does.

        Raises InputError where a tensor of another kind than in a way that there is makes the model fail.
        """
        try:
            return self._compile_first(mode, way, call, outdated)
        except Exception as error:
            # A tensor of another dtype is the usual reason, and a model's own error says less of it.
            misfit = None if way in self._ways else self._find_misfit(call)
            if misfit is None:
                raise
            raise misfit from error

    def _find_misfit(self, call: Call) -> InputError | None:
        """Return what a call has otherwise than a known way, where it is the dtype or dimensions of a tensor alone."""
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
        """Return a mode compiled for a call, with all weights on their devices; keep it as the first of mode and way.

        Raises InputError where a Python value that forward() reads has another value while a graph is made.
        """
        hopeful = set() if outdated is None else name_candidates(outdated.captured, *call)
        said = outdated is None or self._announce(outdated, call, hopeful)
        like = self._kept.get((OTHER_MODE[mode], way, None)) or outdated or self.get_compiled(mode)
        try:
            compiled = self._compile(call, like, outdated)
            if not self._kept:
                # Submodules that forward() makes when it is first called are in the graph.
                self._modules.find_replaced()
        except NoFit as error:
            if mode == "eval" and self._wants_gradients(call):
                error.add_note("without gradients it may fit: call or compile under torch.no_grad(), or inference=True")
            raise
        if outdated is not None and not said:
            self._announce(outdated, call, {n.place.name for n in compiled.captured[PythonState].followed})
        for name, (then, now) in compiled.validity.find_changes().items():
            raise InputError(
                f"forward() reads {name}, which is {now} in this call and {then} whenever a graph is made: decide "
                "outside of forward(), and hand the decision in as an argument"
            )
        self._keep_first(mode, way, compiled)
        if self.weights is not None:
            # The model was built without values; they are read once their places are known.
            self.weights.load(self.model, compiled.program.list_placed(), Extra.WARN)
            self.weights = None
        return compiled

    def _compile(self, call: Call, like: Compiled | None, outdated: Compiled | None) -> Compiled:
        """Return the model's present mode, compiled for a call.

        like: what the model was compiled to before, in the other mode, for other shapes or for another way of calling
            it. Its stages are shared where the graph is the same; otherwise every weight stays on the stage that it has
            in all programs that there are.
        outdated: what was right for the call before something changed, which may be `like`.
        """
        inputs, tensors = Inputs.of(self.model, *call, self.options.chunks)
        # Made before anything is measured: a folder that cannot be dumped to is refused.
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
        same_way = like is not None and self._is_way(like.captured[Example].inputs, self._flatten(call))
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
                assert like is not None, "what serves was compiled before"
                return like.share(self.model, captured)
        if like is None and "kept whole" not in captured[Scope].front_end:  # of those a warning has told already
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

    def _find_here(self) -> frozenset[int] | None:
        """Return the devices that run in this process; None for all of them."""
        return None if self.compile_group is None else frozenset([self.compile_group.world.me])

    def _choose_options(self, call: Call, like: Compiled | None) -> tuple[CompileOptions, bool]:
        """Return what to compile a call with, and whether `like` is for inference, and of no use to a call that trains.

        All weights are planned anew then: the stages of inference may lack the memory to train.
        """
        if self._wants_gradients(call):
            return self.options, like is not None and like.program.inference
        inference = like is None or like.program.inference
        return self.options.for_inference() if inference else self.options, False

    @contextmanager
    def _run_for_compile(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the model run in the block in the modes that it will run in, and leave it as it was."""
        cast = cast_in_place(self._kinds, tensors, self._read_dtype())
        gradients = hide_gradients(self.model.parameters())
        # What stays whole may count its runs.
        with enable_gradients(), cast, leave_saved_hooks(), show_progress(), restore_model(self.model), gradients:
            yield

    def _make_observers(self, inputs: Inputs, tensors: Sequence[Tensor]) -> Sequence[Observer]:
        """Return what watches the chain for the model's present mode and these tensors."""
        if not self.options.observed:
            return []
        self._folder = self._folder or DumpFolder(self.options.dump)
        shapes = inputs.drop_rows(t.shape for t in tensors)
        folder = self._folder.choose(type(self.model).__name__, get_mode(self.model), shapes)
        return make_observers(folder, self.options.passes)

    def _is_outdated(self, compiled: Compiled, call: Call) -> bool:
        """Return whether a record is of Python values, or of weights made by a pass, that are others now.

        So is one for inference where the call wants gradients.
        """
        if compiled.program.inference and self._wants_gradients(call):
            return True
        return bool(compiled.find_changed_weight(self.model) or self._find_changes(compiled, call))

    def _wants_gradients(self, call: Call) -> bool:
        """Return whether outputs of a call are to be differentiable: gradients are on, and something requires one."""
        if self.options.inference or not torch.is_grad_enabled():
            return False
        given = (t for t in pytree.tree_leaves(call) if isinstance(t, Tensor))
        return any(t.requires_grad for t in (*self.model.parameters(), *given))

    def _find_changes(self, compiled: Compiled, call: Call) -> dict[str, tuple[str, str]]:
        """Return the Python values that are others now, in words, and numbers among the arguments."""
        arguments = compiled.captured[Example].inputs.find_changes(*call)
        found = compiled.validity.find_changes()
        return found | {name: (repr(then), repr(now)) for name, (then, now) in arguments.items()}

    def _announce(self, outdated: Compiled, call: Call, followed: set[str]) -> bool:
        """Warn of what a record was made with and has changed since, which costs a compile; return whether it did.

        `followed` are the names of changed numbers that are inputs of the next graph.
        """
        weight = outdated.find_changed_weight(self.model)
        if weight is not None:
            warn_user(
                f"compiling again, because weight {weight!r} of the model has changed, and the pipeline is "
                f"{outdated.program.detached}: leave the pass out while weights change"
            )
            return True
        changes = self._find_changes(outdated, call)
        # Modes are changed on purpose. A number may be a counter, which would cost a compile every call.
        modes = ("training' of the model", "is_grad_enabled()")
        silent = (name in followed or name.endswith(modes) for name in changes)
        name = next((name for name, quiet in zip(changes, silent, strict=True) if not quiet), None)
        if name is not None:
            then, now = changes[name]
            warn_user(
                f"compiling again, because {name} changed from {then} to {now}, and forward() reads it: hand what "
                "changes often to forward() as a tensor"
            )
        return name is not None

    def _bind(self, inputs: Inputs, flat: FlatCall) -> list[Tensor]:
        """Return the tensors of a call, whose floating type may follow the model's; raises InputError for a misfit."""
        return inputs.bind_flat(flat, self._read_dtype(), self._kinds)

    def _read_dtype(self) -> torch.dtype | None:
        """Return the floating type of the model's parameters, or None where it has no such parameters."""
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), None)

    @cached_property
    def _kinds(self) -> tuple[str, ...]:
        """The kinds of devices that stages run on."""
        devices = self.options.machine.devices
        return tuple(dict.fromkeys(d.torch_device.type for d in devices if d.torch_device is not None))
