"""Capture a model for one microbatch: from an nn.Module and example inputs to the IR that passes work on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from fxsplit.errors import InputError, TraceError
from fxsplit.frontend.check.values import run_with_gradients
from fxsplit.frontend.choose_graph import Checked, choose_graph
from fxsplit.frontend.meanings.meanings import find_meanings
from fxsplit.frontend.meanings.wrong_cuts import explain_failure
from fxsplit.frontend.restore.no_trace_left import refuse_assignments, restore_model
from fxsplit.frontend.subject import Subject
from fxsplit.frontend.watch.caches import empty_caches
from fxsplit.frontend.watch.changes import list_changes
from fxsplit.frontend.watch.watch import Watch
from fxsplit.ir.facts.capture.call import Inputs
from fxsplit.ir.facts.capture.chunks import Chunks
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.capture.numbers import find_arguments, find_reads
from fxsplit.ir.facts.capture.python_state import NumberPlace, PythonState
from fxsplit.ir.graph import IR
from fxsplit.system.imports import import_whole
from fxsplit.system.progress import phase
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals.error_texts import is_out_of_memory
from fxsplit.torch_internals.fake.without_weights import lacks_values
from fxsplit.torch_internals.random.generators import read_generators, read_python_generators
from fxsplit.torch_internals.scopes.log import hide_logged_warnings
from fxsplit.torch_internals.scopes.undo import restore_after

FLAGS = ("requires_grad", "is_grad_enabled", "is_leaf", "grad_fn")
"""Names under which code looks at what requires gradients."""
MOST_CHANGES = 5
"""At most this number of changed values is listed in a message."""

LATE = (
    "torch._dynamo",
    "torch.export._trace",
    "torch._export.passes._node_metadata_hook",
    "torch._export.passes.replace_autocast_with_hop_pass",
    "torch._export.passes.replace_set_grad_with_hop_pass",
    "torch._inductor.compiler_bisector",
    "torch._inductor.fx_passes.dedupe_symint_uses",
    "torch._subclasses.schema_check_mode",
    "torch.fx.experimental.validator",
    "sympy.assumptions.wrapper",
    "sympy.tensor.tensor",
)
"""Modules that torch itself imports late: when it first traces or exports a model in a process."""


class CaptureOptions(NamedTuple):
    """Options that the user states about a model.

    - `chunks`: the batch dimension of each argument, see `Inputs.of`
    - `leaves`: paths of submodules that stay whole
    - `joined`: whether outputs of microbatches are to be joined; false if every batch stays whole
    """

    chunks: Chunks | None = None
    leaves: Sequence[str] = ()
    joined: bool = True


NOTHING_STATED = CaptureOptions()


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rows: int | Sequence[int],
    stated: CaptureOptions = NOTHING_STATED,
    from_shapes: bool = False,
    grad_enabled: bool = True,
    earlier: Sequence[IR] = (),
) -> IR:
    """Return the IR of `model(*args, **kwargs)` in its present mode, for microbatches of the first `rows` rows.

    - `rows`: the size of the largest microbatch, or the sizes of all microbatches in order
    - `from_shapes`: compute only shapes, no values, and check the graph only by shapes. This is always so for a model
      with weights on the meta device
    - `grad_enabled`: the caller's grad mode. It matters only for a model that looks at it, as by
      torch.is_grad_enabled()
    - `earlier`: earlier IRs of the model; numbers that have changed since become inputs of this graph, if possible

    The IR has the facts Example, Scope, CallEffects and PythonState.

    Warns of Python values that each call changes, and of outputs that cannot be made from microbatches. Raises
    TraceError if no front end can follow the model, or if no graph computes the same as the model, and InputError for a
    model that does not run on microbatches.
    """
    with phase("loading torch's modules for capture"):
        load_torch()
    _refuse_unknown_weights(model)
    known = find_arguments(earlier, args, kwargs)
    inputs, tensors = Inputs.of(model, args, kwargs, stated.chunks, known)
    divided = (rows,) if isinstance(rows, int) else tuple(rows)
    arguments = [NumberPlace(spec.place, known[spec.name]) for spec in inputs.numbers]
    subject = Subject(
        model,
        inputs,
        tensors,
        max(divided),
        tuple(stated.leaves),
        from_shapes or lacks_values(model),
        numbers=(*arguments, *find_reads(earlier)),
        divided=divided if sum(divided) == inputs.count_rows(tensors) else (),
    )
    # Copied before anything runs, since forward() may write to its arguments.
    sample = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in subject.take_rows(subject.rows))
    # Every attempt runs forward(), which may write to more than the model. If an operator fails, a TraceError replaces
    # torch's log by one line.
    with hide_logged_warnings("torch"), ExitStack() as stack:
        with phase(f"watching the changes that forward() of {subject.name} makes"):
            watch = run_watched(subject) or Watch(model)
        stack.enter_context(restore_after(watch.put_back))
        graph, effects = _choose_watched(subject, watch, grad_enabled)
        with restore_model(model), phase(f"finding how microbatches make the outputs of {subject.name}"):
            asking = replace(subject, asks_for_gradients=watch.asks_for_gradients())
            effects = replace(effects, meanings=find_meanings(asking, graph.gm, joined=stated.joined))
    _set_modes(graph.gm, model)
    # Modules that stay whole read and write by themselves.
    state = watch.list_reads(graph).follow(subject.numbers, graph.followed)
    state = replace(state, stuck=state.stuck.union(*(ir[PythonState].stuck for ir in earlier)))
    inputs = inputs.freeze(but=[number.place.key[1] for number in graph.followed if number.is_argument])
    ir = IR(graph.gm, model=subject.name, mode="train" if model.training else "eval")
    modules = tuple((module, type(module)) for module in model.modules())
    example = Example(inputs, sample, subject.from_shapes, modules, tuple(stated.leaves))
    return ir.learn(example, graph.scope, effects, state)


def run_watched(subject: Subject) -> Watch | None:
    """Run the model once, watched and with gradients, as a watch and a check would run it one after the other.

    Returns the watch, and puts the results of the run into `subject.first`. Returns None, and leaves no trace, if watch
    and check need runs of their own: the model fails with gradients, a call changes Python values or draws from
    Python's or numpy's generators, a module holds an iterator, or the code may ask whether a tensor requires gradients.
    """
    # Only another run shows that an iterator has gone on.
    iterates = any(isinstance(value, Iterator) for module in subject.model.modules() for value in vars(module).values())
    if subject.from_shapes or iterates:
        return None
    watch, generators = Watch(subject.model), (read_generators(), read_python_generators())
    with restore_after(watch.put_back), restore_model(subject.model), subject.make_runnable(subject.rows) as here:
        ran = None
        with suppress(Exception):
            with refuse_assignments(here.model):
                run = run_with_gradients(here, watch.note())
            ran = run
        looks = watch.asks_for_gradients() or watch.may_read(FLAGS)
        moved = generators[1] != read_python_generators()
        if ran is None or looks or moved or watch.find_changes() or watch.gradients or watch.tangents:
            return None
        subject.first.tensors, subject.first.ran, subject.first.generators = here.tensors, ran, generators
    return watch


def _choose_watched(subject: Subject, watch: Watch, grad_enabled: bool) -> Checked:
    """Return a graph that equals the model.

    Warns of Python values that each call of the model changes: a pipeline does not.
    watch: knows the values that forward() changes, and whether it takes gradients itself.
    """
    changes: list[str] = []
    if subject.first.ran is None:
        with torch.set_grad_enabled(grad_enabled), phase(f"watching further calls of forward() of {subject.name}"):
            changes = list_changes(subject, watch)
    apart = bool(changes or watch.gradients or watch.tangents)
    subject = replace(subject, asks_for_gradients=watch.asks_for_gradients(), apart=apart)
    try:
        # Around all attempts: a check runs the model as well.
        with (
            restore_model(subject.model) as restore,
            torch.set_grad_enabled(grad_enabled or not subject.asks_for_gradients),
        ):
            checked = _choose_explained(replace(subject, empty_caches=partial(empty_caches, watch, restore)))
    except TraceError as error:
        for found, say in ((watch.gradients, _say_gradients), (watch.tangents, _say_tangents)):
            if found:
                path, line = next(iter(found.items()))
                raise TraceError(say(subject, path, line), path or None) from error
        if not changes:
            raise
        # The second run of such a model may differ from the first, and so may its graph, so the message begins with the
        # changes.
        what = f"{_say_changes(subject, changes)}. No graph was found that equals the model: {error}"
        raise TraceError(what, error.submodule) from error
    if changes:
        warn_user(_say_changes(subject, changes))
    return checked


LABELS = "labels"
"""The argument from which Hugging Face's models compute their own loss."""


def _choose_explained(subject: Subject) -> Checked:
    """Return the checked graph of a subject; raises InputError for a model that only runs on whole batches."""
    try:
        return choose_graph(subject)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # Front ends blame the code that they cannot follow, but the model itself may have refused the number of rows.
        explained = explain_failure(subject, error)
        if explained is not None:
            raise explained from error
        labelled = any(spec.name == LABELS for spec in subject.inputs.specs)
        if isinstance(error, TraceError) and labelled and LABELS in str(error):
            way = f"or call {subject.name} without {LABELS}, and compute the loss of its outputs in loss_fn"
            raise TraceError(f"{error}, {way}", error.submodule) from error
        raise


def _say_tangents(subject: Subject, path: str, line: str) -> str:
    """Return a message for a forward() that takes derivatives in forward mode, and so has no graph."""
    where = f"in submodule {path!r}" if path else "in its own forward()"
    way = f"keep that submodule whole, fxsplit.leaf({path!r})" if path else "move that part into a submodule"
    return (
        f"{subject.name} takes derivatives by itself {where} at {line}, as torch.func.jvp does, which no graph can "
        f"hold: {way}, which is one node then"
    )


def _say_gradients(subject: Subject, path: str, line: str) -> str:
    """Return a message for a forward() that takes gradients itself, and so has no graph."""
    where = f"in submodule {path!r}" if path else "in its own forward()"
    way = "take it" if path else "move that part into a submodule, take it there"
    return (
        f"{subject.name} takes a gradient by itself {where} at {line}, as autograd.grad does, and no graph can hold it:"
        f" {way} inside of torch.enable_grad(), since the model also runs without gradients, and keep that submodule "
        f"whole, fxsplit.leaf({path or 'its.path'!r})"
    )


def _say_changes(subject: Subject, changes: Sequence[str]) -> str:
    """Return a message about the effects of forward() that a pipeline does not have."""
    more = f" and {len(changes) - MOST_CHANGES} more" if len(changes) > MOST_CHANGES else ""
    return (
        f"forward() of {subject.name} changes {'; '.join(changes[:MOST_CHANGES])}{more}. A pipeline does not: its "
        "stages run only operators on tensors, and whole submodules once for each microbatch. Return such a value as "
        "an output, or change it outside of forward()"
    )


def _set_modes(gm: fx.GraphModule, model: nn.Module) -> None:
    """Put each module that only the graph has into the mode (train or eval) of the model's module at the same path."""
    # Exported graphs always claim to be in training mode. Modules that the graph calls are the model's own, and are
    # left alone.
    own = dict(model.named_modules(remove_duplicate=False))
    known = {id(module) for module in own.values()}
    for path, module in gm.named_modules():
        if id(module) not in known:
            module.training = own.get(path, model).training


def load_torch() -> None:
    """Import the modules that torch would import during a trace. An interrupt there would leave them half imported."""
    import_whole(LATE, if_there=True)


def _refuse_unknown_weights(model: nn.Module) -> None:
    """Raise InputError for a weight without a shape, and TraceError for a submodule that hides its weights."""
    # A lazy weight gets its shape from the first call, and that call must not be one of fxsplit's.
    lazy = next((path for path, w in (*model.named_parameters(), *model.named_buffers()) if is_lazy(w)), None)
    if lazy is not None:
        raise InputError(f"{lazy!r} has no shape yet: call {type(model).__name__} once, then compile it")
    # torch.jit keeps parameters in C++, so a stage cannot share them with the model.
    scripted = next((path for path, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise TraceError(
            f"submodule {scripted!r} of {type(model).__name__} is from torch.jit, which keeps its parameters to itself:"
            " give the model the module that it was scripted or traced from"
        )
