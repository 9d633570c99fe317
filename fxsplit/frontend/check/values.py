"""Check a graph against the model before anything builds on it: outputs, gradients and side effects.

Model and graph run on the same rows. The graph must return the same values, write the same values to buffers and
arguments, and have the same gradients. Both runs leave the model unchanged.

Usually one run of each is enough: the gradients of parameters and inputs are taken from the run that makes the outputs.
Fake tensors have only shapes, so autograd's graph shows which gradients exist. If this finds any fault, model and graph
run again: first without gradients, and then with them. These runs name the fault, or find that there is none: a model
may run only without gradients, and gradients that nobody needs may be missing.

A graph runs in two ways: node by node, so that errors name the node, and as the code that stages run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from fxsplit.errors import FxsplitError, InputError, TraceError
from fxsplit.frontend.check.gradients import (
    GradientComparison,
    Gradients,
    check_gradients,
    check_paths,
    compare_gradients,
    differentiate,
    find_parameters,
    make_leaves,
    name_gradients,
    require_gradients,
)
from fxsplit.frontend.check.noise import Noise
from fxsplit.frontend.check.outputs import refuse_objects, unpack_output
from fxsplit.frontend.check.run import Runner, describe, make_noting, run_code
from fxsplit.frontend.graph import list_fetched
from fxsplit.frontend.restore.no_trace_left import refuse_assignments
from fxsplit.frontend.stop_point import find_stopped
from fxsplit.frontend.subject import Runnable, RunOfModel, Subject
from fxsplit.ir.facts.capture.effects import CallEffects
from fxsplit.ir.facts.capture.scope import Scope
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.autograd.leaves import watch_hooks
from fxsplit.torch_internals.error_texts import is_refusal_to_differentiate
from fxsplit.torch_internals.fake.snapshot import Snapshot, keep_values
from fxsplit.torch_internals.fake.values import has_values
from fxsplit.torch_internals.fx.interpret import get_storage_id, preserve
from fxsplit.torch_internals.nn.batch_norm import is_batch_norm
from fxsplit.torch_internals.nn.containers import drop_foreign_fields, rebuild, to_plain_outputs
from fxsplit.torch_internals.tensors.sparse_layouts import list_parts

TAKES_GRADIENTS = (
    "forward() of {} takes a gradient by itself, as autograd.grad does, and it also runs without gradients: take it in "
    "a submodule, inside of torch.enable_grad(), and keep that submodule whole, fxsplit.leaf('its.path')"
)
"""The error for a model that differentiates in forward() and fails under no_grad."""

By = Literal["nodes", "code", "both"]
"""The way to run a graph: node by node, as its code, or both."""


def check_graph(subject: Subject, gm: fx.GraphModule, rows: int, *, by: By = "both") -> CallEffects:
    """Return the effects of one call. Raises TraceError if model and graph differ on the first `rows` rows.

    Raises InputError for an output that is neither a tensor nor a constant.
    This changes `gm`: its output becomes plain containers of tensors. If it runs node by node, its nodes get the shapes
    of their values for dumps.
    by: how to run the graph. The code is the same for any number of rows, so one check by code is enough.
    """
    with refuse_assignments(subject.model), subject.make_runnable(rows, gm) as here:
        try:
            effects = _compare(here, gm, by)
        except (RuntimeError, ValueError, TypeError) as error:
            if not subject.from_shapes or isinstance(error, FxsplitError):
                raise
            # Without values, torch's own errors do not help the user.
            stopped = find_stopped(subject.model, error)
            raise TraceError(
                f"{subject.name} does not run on shapes only, and stops{stopped}. Build it with its weights if "
                "forward() decides by values, or if it uses a tensor that is neither parameter nor buffer"
            ) from error
    # The checked buffers may be copies or fake tensors.
    own = {path: subject.model.get_buffer(path) for path in effects.written_buffers}
    return replace(effects, written_buffers=own)


def check_other_sizes(subject: Subject, gm: fx.GraphModule, scope: Scope) -> None:
    """Raise TraceError unless a graph is right for all other sizes of microbatches than the largest.

    Only a graph with a constant number of rows is run, since it has other constants for each size.
    """
    for size in subject.sizes[1:] if scope.rows_fixed else ():
        check_graph(subject, gm, size)


def _compare(here: Runnable, gm: fx.GraphModule, by: By) -> CallEffects:
    """Compare model and graph as they are in `here`, perhaps as copies, and return the effects of a call.

    gm: the graph that the IR will hold. It gets the shapes, and the plain containers of the output.
    """
    # A graph may equal the first call of a model that changes from call to call, but not the second one. A model that
    # takes gradients by itself may run with gradients, but not without them.
    apart = here.asks_for_gradients or (here.apart and has_values(here.tensors[0]))
    if not apart:
        # Any fault is found again, and named, by the separate runs.
        with suppress(Exception), refuse_assignments(here.model):
            return _compare_runs(here, gm, by, at_once=True)
        # The separate runs look for the fault by themselves, and may need its memory.
        here.first.forget()
    return _compare_runs(here, gm, by, at_once=False)


def _compare_runs(here: Runnable, gm: fx.GraphModule, by: By, *, at_once: bool) -> CallEffects:
    """Compare one run of the model with one run of the graph, and their gradients. Returns the effects of a call.

    at_once: take the gradients from the same runs.
    """
    parameters = find_parameters(here)
    # Model and graph get their own inputs, since forward() may write to its arguments.
    leaves = [make_leaves(here, of_inputs=at_once) for _ in range(2)]
    copies = [leaf.clone() for leaf in leaves[1]]
    versions = [t._version for t in copies]
    # If the model looks at the grad mode, its graph is for the caller's mode.
    records = at_once or (here.asks_for_gradients and torch.is_grad_enabled())
    derives = at_once and has_values(here.tensors[0])
    trained = [*parameters.values()] if derives else None
    by_code = by == "code" or (by == "both" and derives)

    noise = Noise(lambda: _name_values(here, _run_model(here, make_leaves(here, of_inputs=at_once), trained)))
    with torch.set_grad_enabled(records), require_gradients(here) if at_once else nullcontext():
        ran = (here.first.find(here.tensors) if derives else None) or _run_model(here, leaves[0], trained)
        run = _choose_run(here, gm, by, by_code=by_code)
        graph = _run_graph(here, run, copies, partial(_derive, trained, leaves[1]))
        for (name, _), value, found in zip(here.model.named_buffers(), ran.buffers, graph.buffers, strict=True):
            _compare_values(here, _name_buffer(name), value, found, noise)
        expected, dropped = drop_foreign_fields(ran.outputs)
        # Differences in values come first, since they explain differences in gradients.
        wanted = _compare_outputs(here, expected, graph.outputs, noise)
        for spec, a, b in zip(here.inputs.specs, ran.arguments, copies, strict=True):
            _compare_values(here, _name_argument(spec.name), a, b, noise)
        if ran.gradients is not None and graph.gradients is not None:
            compare_gradients(here, list(parameters), ran.gradients, graph.gradients, noise)
        proven = at_once and (ran.gradients is not None or check_paths(here, (expected, graph.outputs), leaves))
    compared = GradientComparison(graph.hooked, by_code) if proven else check_gradients(here, by_code=by != "nodes")
    if by == "both" and not compared.by_code:
        run_code(here)
    refuse_objects(here, wanted)
    unpack_output(gm, graph.outputs)
    containers = _find_own_containers(here, expected, graph.outputs)
    here.note_outputs(ran.outputs)
    _warn_of_output(here, ran.rewritten, dropped)
    return CallEffects(
        writes_inputs=[t._version for t in copies] != versions,
        written_buffers=graph.written,
        saved_buffers=graph.saved,
        sets_hooks=compared.sets_hooks,
        containers=containers,
    )


class _RunOfGraph(NamedTuple):
    """The results of a run of the graph.

    - `outputs`: its outputs in plain containers
    - `gradients`: its gradients (None: not computed in this run)
    - `buffers`: the values that it leaves in the model's buffers
    - `hooked`: whether it puts hooks on activations
    - `written`: the buffers that it has written to, by path, without the statistics of batch norms
    - `saved`: the paths of written buffers that something may save for backward
    """

    outputs: Any
    gradients: Gradients | None
    buffers: list[Tensor]
    hooked: bool
    written: dict[str, Tensor]
    saved: tuple[str, ...]


def _name_values(here: Runnable, ran: RunOfModel) -> dict[str, Tensor]:
    """Return all values of a run of the model, by the names that errors use."""
    named = {_name_buffer(name): b for (name, _), b in zip(here.model.named_buffers(), ran.buffers, strict=True)}
    outputs = pytree.tree_leaves(to_plain_outputs(drop_foreign_fields(ran.outputs)[0]))
    named |= {_name_output(i): value for i, value in enumerate(outputs) if isinstance(value, Tensor)}
    named |= {_name_argument(spec.name): t for spec, t in zip(here.inputs.specs, ran.arguments, strict=True)}
    return named | name_gradients(here, list(find_parameters(here)), ran.gradients or ())


def _name_buffer(name: str) -> str:
    """Return the name of a buffer in an error."""
    return f"buffer {name!r}"


def _name_output(number: int) -> str:
    """Return the name of an output in an error."""
    return f"output {number}"


def _name_argument(name: str) -> str:
    """Return the name of an argument that forward() may write to, in an error."""
    return f"argument {name!r}, which it writes to,"


def _choose_run(here: Runnable, gm: fx.GraphModule, by: By, *, by_code: bool) -> Callable[..., Any]:
    """Return the function that runs the graph. It notes shapes in the nodes of `gm`, unless `by` is "code"."""
    if not by_code:
        return Runner(here.graph, gm).run
    return here.graph.forward if by == "code" else make_noting(here.graph, gm)


def _derive(parameters: Sequence[Tensor] | None, leaves: Sequence[Tensor], outputs: Any) -> Gradients | None:
    """Return the gradients of outputs, or None if `parameters` is None: this run then takes no gradients."""
    return None if parameters is None else differentiate(outputs, parameters, leaves)


def _run_graph(
    here: Runnable, run: Callable[..., Any], tensors: Sequence[Tensor], derive: Callable[[Any], Gradients | None]
) -> _RunOfGraph:
    """Run the graph by calling `run`, and take gradients of its outputs.

    Afterwards the model's buffers are as before.
    """
    hooked: list[Tensor] = []
    # The run of the model has restored its buffers, so both start from the same values.
    before = Snapshot(here.modules.buffers())
    with preserve(here.modules), watch_hooks(hooked.append):
        # A graph returns fx's own containers, and their structure is not that of plain ones.
        outputs = rebuild(run(*tensors), lambda leaf: leaf)
        # Take gradients inside the block: its end restores buffers, and a backward may read them.
        gradients = derive(outputs)
        buffers = [b.clone() for b in here.model.buffers()]
        # By memory, since a write may go through a view, or through another name of a buffer.
        changed = {get_storage_id(t) for t in before.changed()}
        saved = _find_saved_buffers(here, changed)
        written = {path: b for path, b in here.model.named_buffers() if get_storage_id(b) in changed}
    # A pass keeps the statistics of batch norms in order; nothing does so for other buffers.
    statistics = {id(b) for m in here.model.modules() if is_batch_norm(m) for b in m.buffers(recurse=False)}
    written = {path: b for path, b in written.items() if id(b) not in statistics}
    return _RunOfGraph(outputs, gradients, buffers, bool(hooked), written, saved)


def _warn_of_output(here: Runnable, rewritten: Sequence[str], dropped: Sequence[str]) -> None:
    """Warn of arguments that forward() has changed, and of outputs that are left out."""
    if rewritten:
        warn_user(
            f"forward() of {here.name} changes its argument {rewritten[0]!r}, and the pipeline hands it a copy: the "
            "caller's object does not change. Return the new values as an output"
        )
    if dropped:
        warn_user(
            f"{here.name} returns {', '.join(dropped)}, which a pipeline cannot hand on: it is left out "
            "of the outputs (use_cache=False, for example, does not make it)"
        )


def run_with_gradients(here: Runnable, around: AbstractContextManager[object]) -> RunOfModel:
    """Run the model as a check runs it: on all rows, with gradients of all floating-point parameters and inputs.

    around: the block to call forward() in. Raises what `_run_model` raises.
    """
    with torch.enable_grad(), require_gradients(here):
        return _run_model(here, make_leaves(here, of_inputs=True), [*find_parameters(here).values()], around)


def _run_model(
    here: Runnable,
    leaves: Sequence[Tensor],
    parameters: Sequence[Tensor] | None,
    around: AbstractContextManager[object] | None = None,
) -> RunOfModel:
    """Run the model on copies of `leaves`, and take gradients of its outputs. Afterwards its buffers are as before.

    parameters: gradients are taken with respect to these and to `leaves`; None: no gradients are taken.
    around: the block to call forward() in.
    Raises TraceError, with the parameter's name, if forward() has written to a parameter, and InputError for a buffer
    that it has resized.
    """
    shapes = {path: tuple(b.shape) for path, b in here.model.named_buffers()}
    # A copy of each leaf: forward() may write to its arguments, and autograd forbids that on a leaf.
    tensors = [leaf.clone() for leaf in leaves]
    # Parameters too, since preserve() only restores buffers.
    with keep_values(here.model.parameters()) as weights, preserve(here.modules):
        try:
            call = here.inputs.make_call(tensors)
            with around or nullcontext():
                returned = here.run_call(call)
            gradients = _derive(parameters, leaves, returned)
        except Exception as error:
            if not torch.is_grad_enabled() and is_refusal_to_differentiate(error):
                raise TraceError(TAKES_GRADIENTS.format(here.name)) from error
            error.add_note(f"fxsplit called the unsplit model with one microbatch of {here.rows} rows")
            raise
        buffers = [b.clone() for b in here.model.buffers()]
        _refuse_resized(here, shapes)
        changed = {id(p) for p in weights.changed()}
        written = [path for path, p in here.model.named_parameters() if id(p) in changed]
    if written:
        raise TraceError(
            f"forward() of {here.name} writes to parameter {written[0]!r}, which a training step must not: write to it "
            "outside of forward(), for example after optimizer.step() (Embedding: leave max_norm= out)"
        )
    return RunOfModel(returned, buffers, tensors, here.inputs.find_rewritten(call, tensors), gradients)


def _refuse_resized(here: Runnable, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise InputError for a buffer that has another shape than in `shapes`: a graph is for buffers of one shape."""
    now = {path: tuple(b.shape) for path, b in here.model.named_buffers()}
    path = next((path for path, shape in now.items() if shapes.get(path) != shape), None)
    if path is None:
        return
    before, after = shapes.get(path), now[path]
    if after[:1] == (here.rows,) and before is not None and (len(after) > 1 or len(before) == 1 < sum(before)):
        raise InputError(
            f"forward() of {here.name} gives buffer {path!r} a row for each row of its batch ({before} before, {after} "
            f"after a call with {here.rows} rows), so it would only hold the rows of the last microbatch: let "
            "forward() make this state from its input, and pass it from call to call as a value. A buffer must not "
            "depend on the number of rows"
        )
    raise InputError(
        f"forward() of {here.name} resizes buffer {path!r} from {before} to {after}, as observers of "
        f"torch.ao.quantization do in their first call: call {here.name} once, then compile it"
    )


def _find_saved_buffers(here: Runnable, changed: set[int]) -> tuple[str, ...]:
    """Return the paths of buffers that each call writes and that something may save for backward.

    These are the buffers that the graph fetches, and those of modules from outside torch; torch's modules save no state
    of their own. `changed`: the storages that a call has written.
    Raises TraceError for a write to a tensor that is not a buffer: a graph would keep it from call to call.
    """
    held = {get_storage_id(b) for b in here.model.buffers()}
    fetched = {path: t for path, t in list_fetched(here.graph).items() if isinstance(t, Tensor)}
    found = {path: t for path, t in fetched.items() if get_storage_id(t) in changed}
    for path, tensor in found.items():
        if get_storage_id(tensor) not in held:
            raise TraceError(
                f"forward() of {here.name} writes in place to {path!r}, a constant of the graph that would "
                "keep the written values from call to call: make it from an input (x.new_zeros(...)), or register it "
                "as a buffer if it is meant to last"
            )
    # A module that stays whole fetches its buffers itself, and the graph does not show it.
    for path, module in here.model.named_modules():
        if not type(module).__module__.startswith("torch."):
            own = ((f"{path}.{name}".removeprefix("."), b) for name, b in module.named_buffers(recurse=False))
            found |= {name: b for name, b in own if get_storage_id(b) in changed}
    return tuple(found)


def _compare_outputs(here: Runnable, expected: Any, got: Any, noise: Noise) -> list[Any]:
    """Return the model's outputs as a list.

    Raises TraceError unless the graph returns the same in the same containers.
    """
    wanted, structure = pytree.tree_flatten(to_plain_outputs(expected))
    found, found_structure = pytree.tree_flatten(got)
    if structure != found_structure:
        raise TraceError(
            f"the graph of {here.name} returns {found_structure} and the model returns {structure}: "
            "return tensors, tuples, lists or dicts of them"
        )
    for i, (a, b) in enumerate(zip(wanted, found, strict=True)):
        _compare_values(here, _name_output(i), a, b, noise)
    return wanted


def _find_own_containers(here: Runnable, expected: Any, got: Any) -> pytree.TreeSpec | None:
    """Return the structure of the model's output if the graph's output has another structure, else None.

    Raises TraceError for a container that torch's pytrees take for a leaf, since outputs could not be put back into it.
    """
    leaves, structure = pytree.tree_flatten(expected)
    unknown = next((v for v in leaves if isinstance(v, (dict, list, tuple))), None)
    if unknown is not None:
        raise TraceError(
            f"{here.name} returns a {type(unknown).__name__}, which torch's pytrees do not know: return "
            "tensors, tuples, lists or dicts of them, or register the type with torch.utils._pytree"
        )
    return None if structure == pytree.tree_structure(got) else structure


def _compare_values(here: Runnable, what: str, wanted: Any, found: Any, noise: Noise) -> None:
    """Raise TraceError unless the graph's value (`found`) equals the model's value (`wanted`).

    `what` names it in the error.
    """
    # Constants are part of the structure of the graph's output.
    if not isinstance(wanted, Tensor):
        return
    same_kind = isinstance(found, Tensor) and found.shape == wanted.shape and found.dtype == wanted.dtype
    if same_kind and has_values(wanted) and found.device != wanted.device:
        raise TraceError(
            f"the graph of {here.name} makes {what} on {found.device}, and the model makes it on {wanted.device}: "
            "forward() uses the default device, which the graph does not know; make it on the device of an input "
            "(device=x.device)"
        )
    if not same_kind or not _is_close(what, wanted, found, noise):
        kinds = f"the graph gives {describe(found)}, the model {describe(wanted)}"
        raise TraceError(
            f"the graph of {here.name} computes {what} differently from the model ({kinds}): "
            "tracing kept something that changes between calls, such as a Python number or a random draw, or a hook or "
            "mode inside forward() is not in the graph; move the changing value into a tensor, or wrap the function "
            "that makes it with torch.fx.wrap"
        )


def _is_close(what: str, a: Tensor, b: Tensor, noise: Noise) -> bool:
    """Return whether two tensors are equal, up to kernels that give other results in each run.

    True for fake tensors.
    """
    if not has_values(a):
        return True
    if a.layout is torch.strided:
        return noise.covers(what, a, b)
    pairs = list(zip(list_parts(a), list_parts(b), strict=True))
    return all(x.shape == y.shape and _is_close(f"{what}, part {i}", x, y, noise) for i, (x, y) in enumerate(pairs))
