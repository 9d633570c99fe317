"""Check a graph against the model before anybody builds on it: outputs, gradients, and what either leaves behind."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxsplit.errors import FxsplitError, TraceError
from fxsplit.frontend.check.gradients import TOLERANCE, check_gradients
from fxsplit.frontend.check.outputs import ShapeRecorder, find_output_dims, unpack_output
from fxsplit.ir.facts.call import Inputs
from fxsplit.torch_internals.containers import drop_foreign_fields, rebuild, to_plain_outputs
from fxsplit.torch_internals.fake_weights import Snapshot, has_values, make_runnable
from fxsplit.torch_internals.interpret import describe_tensor, get_storage_id, preserve


def check_graph(
    model: nn.Module,
    gm: fx.GraphModule,
    inputs: Inputs,
    tensors: Sequence[Tensor],
    from_shapes: bool = False,
    cut: bool = True,
) -> dict[str, Any]:
    """Run the model and the graph on the same rows, without a trace on either, and compare all they leave behind.

    `from_shapes`: their shapes alone. `cut`: they are not all rows of a batch, whose outputs have to be joined. Returns
    what the Example is to know of it.
    """
    pair = nn.ModuleList([model, gm])  # constants of the graph are buffers of gm
    with make_runnable(pair, tensors, from_shapes) as (both, given):
        try:
            return _compared(model, gm, both, inputs, given, cut)
        except (RuntimeError, ValueError, TypeError) as error:
            if not from_shapes or isinstance(error, FxsplitError):
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TraceError(
                f"{type(model).__name__} does not run on shapes alone ({reason}): forward() decides by values, or uses "
                "a tensor that is neither parameter nor buffer; build it with its weights"
            ) from error


def _compared(
    model: nn.Module, gm: fx.GraphModule, both: nn.ModuleList, inputs: Inputs, tensors: Sequence[Tensor], cut: bool
) -> dict[str, Any]:
    """Do so with `both`, the model and the graph as they can run here."""
    rows = inputs.rows(tensors)
    mine, traced = both[0], both[1]
    assert isinstance(traced, fx.GraphModule)
    given, copies = ([t.detach().clone() for t in tensors] for _ in range(2))
    versions = [t._version for t in copies]
    with torch.no_grad():
        weights = Snapshot(mine.parameters())
        with preserve(both):
            call = inputs.call(given)
            try:
                expected = mine.forward(*call.args, **call.kwargs)  # the model's own hooks run around the pipeline
            except Exception as error:
                error.add_note(f"fxsplit called the unsplit model with one microbatch of {rows} rows")
                raise
            state = [b.clone() for b in mine.buffers()]
        _check_weights(model, mine, weights)
        before = Snapshot(both.buffers())
        with preserve(both):
            got = rebuild(ShapeRecorder(traced, gm).run(*copies), lambda leaf: leaf)
            for (name, buffer), value in zip(mine.named_buffers(), state, strict=True):
                _compare(model, f"buffer {name!r}", value, buffer)
            changed = before.changed()
            rewritten = _rewritten(model, mine, traced, changed)
            memory = {get_storage_id(t) for t in changed}
            updated = tuple(name for name, b in mine.named_buffers() if get_storage_id(b) in memory)
    expected, dropped = drop_foreign_fields(expected)
    flat = to_plain_outputs(expected)
    (wanted, structure), (found, found_structure) = pytree.tree_flatten(flat), pytree.tree_flatten(got)
    if structure != found_structure:
        raise TraceError(
            f"the graph of {type(model).__name__} returns {found_structure} and the model returns {structure}: "
            "return tensors, tuples, lists or dicts of them"
        )
    for i, (a, b) in enumerate(zip(wanted, found, strict=True)):
        _compare(model, f"output {i}", a, b)
    for spec, a, b in zip(inputs.specs, given, copies, strict=True):
        _compare(model, f"argument {spec.name!r}, which it writes to,", a, b)
    hooking = check_gradients(model, both, inputs, tensors)
    joined = find_output_dims(model, mine, inputs, tensors, wanted, cut)
    unpack_output(gm, got)
    own = pytree.tree_structure(expected)
    unknown = next((v for v in pytree.tree_leaves(expected) if isinstance(v, (dict, list, tuple))), None)
    if unknown is not None:
        raise TraceError(
            f"{type(model).__name__} returns a {type(unknown).__name__}, which torch's pytrees do not know: return "
            "tensors, tuples, lists or dicts of them, or register the type with torch.utils._pytree"
        )
    if dropped:
        warnings.warn(
            f"{type(model).__name__} returns {', '.join(dropped)}, which is nothing that a pipeline could hand on: it "
            "is left out of the outputs (use_cache=False, for example, does not make it)",
            stacklevel=2,
        )
    written = [t._version for t in copies] != versions
    returns = None if own == structure else own
    findings = {"written": written, "updated": updated, "rewritten": rewritten, "hooking": hooking}
    return {**findings, "returns": returns, "joined": joined}


def _check_weights(model: nn.Module, mine: nn.Module, weights: Snapshot) -> None:
    """Raise TraceError, naming a parameter, if forward() has written to it; all are as they were afterwards."""
    changed = {id(p) for p in weights.changed()}
    written = [path for path, p in mine.named_parameters() if id(p) in changed]
    weights.restore()
    if written:
        raise TraceError(
            f"forward() of {type(model).__name__} writes to parameter {written[0]!r}, which a training step must not: "
            "write to it outside of forward(), for example after optimizer.step() (Embedding: leave max_norm= out)"
        )


def _rewritten(model: nn.Module, mine: nn.Module, traced: fx.GraphModule, changed: Sequence[Tensor]) -> tuple[str, ...]:
    """Return the paths of buffers that each call writes and that something may save for backward.

    Those are what the graph fetches, and what modules from outside torch hold; torch's own save no state of their own.
    Raises TraceError for a write to a tensor that is no buffer: a graph would keep it from call to call.
    """
    memory = {get_storage_id(t) for t in changed}
    held = {get_storage_id(b) for b in mine.buffers()}
    found = {
        path: t for path, t in list_fetched(traced).items() if isinstance(t, Tensor) and get_storage_id(t) in memory
    }
    for path, tensor in found.items():
        if get_storage_id(tensor) not in held:
            raise TraceError(
                f"forward() of {type(model).__name__} writes in place to {path!r}, a constant of the graph that would "
                "keep what was written from call to call: make it from an input (x.new_zeros(...)), or register it "
                "as a buffer if it is meant to last"
            )
    for path, module in mine.named_modules():
        if not type(module).__module__.startswith("torch."):
            own = ((f"{path}.{name}".removeprefix("."), b) for name, b in module.named_buffers(recurse=False))
            found |= {name: b for name, b in own if get_storage_id(b) in memory}
    return tuple(found)


def _compare(model: nn.Module, what: str, wanted: Any, found: Any) -> None:
    """Raise TraceError unless the graph has left behind what the model has."""
    if not isinstance(wanted, Tensor):
        return
    same_kind = isinstance(found, Tensor) and found.shape == wanted.shape and found.dtype == wanted.dtype
    if not same_kind or not _close(wanted, found):
        kinds = f"the graph gives {_kind(found)}, the model {_kind(wanted)}"
        raise TraceError(
            f"the graph of {type(model).__name__} computes {what} differently from the model ({kinds}): "
            "tracing kept something that changes between calls, such as a Python number or a random draw, or a hook or "
            "mode inside forward() is not in the graph; move what changes into a tensor, or wrap the function that "
            "makes it with torch.fx.wrap"
        )


def _kind(value: Any) -> str:
    """Return a value's dtype and shape for a message."""
    return describe_tensor(value) if isinstance(value, Tensor) else type(value).__name__


def _close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal but for non-deterministic kernels."""
    if not has_values(a):
        return True
    if not a.is_floating_point() or a.numel() == 0:
        return bool(torch.equal(a, b))
    size = float(torch.nan_to_num(a, posinf=0.0, neginf=0.0).abs().max())
    return bool(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * size, equal_nan=True))


def list_fetched(gm: fx.GraphModule) -> dict[str, Any]:
    """Return what the graph fetches, by its path: parameters, buffers, and constants that tracing made."""
    paths = [str(n.target) for n in gm.graph.nodes if n.op == "get_attr"]
    return {path: operator.attrgetter(path)(gm) for path in paths}
