"""Capture a model for one microbatch and check the graph against the model before anybody builds on it."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from fxsplit.errors import InputError, TraceError
from fxsplit.inputs import Example, Inputs
from fxsplit.ir import IR
from fxsplit.observe import on_one_device, preserved, storage_id, tensor_text
from fxsplit.structures import rebuild
from fxsplit.trace.tracer import symbolic_trace

TOLERANCE = 1e-5
"""The same operators in the same order give the same bits; only non-deterministic kernels need any tolerance."""


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], rows: int) -> IR:
    """Return the IR of `model(*args, **kwargs)` in its present mode, with its first `rows` rows as the Example.

    Raises TraceError when tracing fails or when the graph computes anything else than the model does, InputError when
    an output is not batched on dimension 0.
    """
    lazy = next((path for path, w in (*model.named_parameters(), *model.named_buffers()) if is_lazy(w)), None)
    if lazy is not None:
        raise InputError(f"{lazy!r} has no shape yet: call {type(model).__name__} once, then compile it")
    inputs, tensors = Inputs.of(model, args, kwargs)
    example = Example(inputs, tuple(t.detach()[:rows].clone().requires_grad_(t.requires_grad) for t in tensors))
    with untouched(model):
        with unassigned(model):
            gm = symbolic_trace(model, inputs)
        with unassigned(model):
            findings = _check(model, gm, inputs, [t[:rows] for t in tensors])
            if rows == 1:  # one row alone would not show an output that is no batch
                _check(model, gm, inputs, [t[:2] for t in tensors])
    return IR(gm).learn(replace(example, **findings))


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of every module after the block: compiling must leave no trace on the model."""
    before = [(m, dict(m.__dict__)) for m in model.modules()]
    values = [v for _, held in before for name, v in held.items() if not name.startswith("_")]
    contents = [(v, copy.copy(v)) for v in values if type(v) in (list, dict, set)]
    tensors = [(v, v.detach().clone()) for v in values if isinstance(v, Tensor)]  # neither parameters nor buffers
    try:
        yield
    finally:
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for tensor, value in tensors:
            tensor.detach().copy_(value)
        for collection, kept in contents:
            collection.clear()
            collection.extend(kept) if isinstance(collection, list) else collection.update(kept)


@contextmanager
def unassigned(model: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers that the block assigned, and raise TraceError naming one.

    A graph cannot assign: it would lose the new value, and tracing would leave a placeholder in the model.
    """
    before = [(path, held, dict(held)) for path, m in model.named_modules() for held in (m._parameters, m._buffers)]
    assigned = []
    try:
        yield
    finally:
        for path, held, kept in before:
            names = [name for name in {**held, **kept} if held.get(name) is not kept.get(name)]
            assigned += [f"{path}.{name}".removeprefix(".") for name in names]
            held.clear()
            held.update(kept)
    if assigned:
        raise TraceError(
            f"forward() of {type(model).__name__} assigns to {assigned[0]!r}, which a graph cannot hold: write it in "
            "place, for example self.count.add_(1) for self.count += 1"
        )


def same_graph(a: fx.GraphModule, b: fx.GraphModule) -> bool:
    """Return whether two captures of one model are the same operations on the same modules and constants."""
    return _skeleton(a) == _skeleton(b) and all(
        one is other or (isinstance(one, Tensor) and isinstance(other, Tensor) and _identical(one, other))
        for one, other in zip(fetched(a).values(), fetched(b).values(), strict=True)
    )


def fetched(gm: fx.GraphModule) -> dict[str, Any]:
    """Return what the graph fetches, by its path: parameters, buffers, and constants that tracing made."""
    paths = [str(n.target) for n in gm.graph.nodes if n.op == "get_attr"]
    return {path: operator.attrgetter(path)(gm) for path in paths}


def _identical(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same but for where they are kept."""
    return a.dtype == b.dtype and a.shape == b.shape and a.device == b.device and bool(torch.equal(a, b))


def _skeleton(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Return every node without what is unique to one graph."""
    return [(n.op, n.name, n.target, repr(n.args), repr(n.kwargs)) for n in gm.graph.nodes]


def _check(model: nn.Module, gm: fx.GraphModule, inputs: Inputs, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Run the model and the graph on the same rows, without a trace on either, and compare all they leave behind.

    Returns what the Example is to know of it.
    """
    rows = int(tensors[0].shape[0])
    both, tensors = on_one_device(nn.ModuleList([model, gm]), tensors)  # constants of the graph are buffers of gm
    mine, traced = both[0], both[1]
    assert isinstance(traced, fx.GraphModule)
    given, copies = ([t.detach().clone() for t in tensors] for _ in range(2))
    versions = [t._version for t in copies]
    with torch.no_grad():
        weights = {path: (p, p.detach().clone()) for path, p in mine.named_parameters()}
        with preserved(both):
            call = inputs.call(given)
            try:
                expected = mine.forward(*call.args, **call.kwargs)  # the model's own hooks run around the pipeline
            except Exception as error:
                error.add_note(f"fxsplit called the unsplit model with one microbatch of {rows} rows")
                raise
            state = [b.clone() for b in mine.buffers()]
        _check_weights(model, weights)
        before = {name: b.clone() for name, b in both.named_buffers()}
        with preserved(both):
            got = rebuild(_ShapeRecorder(traced, gm).run(*copies), lambda leaf: leaf)
            for (name, buffer), value in zip(mine.named_buffers(), state, strict=True):
                _compare(model, f"buffer {name!r}", value, buffer)
            changed = [t for name, t in both.named_buffers() if not torch.equal(t, before[name])]
            rewritten = _rewritten(model, mine, traced, changed)
            memory = {storage_id(t) for t in changed}
            updated = tuple(name for name, b in mine.named_buffers() if storage_id(b) in memory)
    plain = rebuild(expected, lambda leaf: leaf)
    (wanted, structure), (found, found_structure) = pytree.tree_flatten(plain), pytree.tree_flatten(got)
    if structure != found_structure:
        raise TraceError(
            f"the graph of {type(model).__name__} returns {found_structure} and the model returns {structure}: "
            "return tensors, tuples, lists or dicts of them"
        )
    for i, (a, b) in enumerate(zip(wanted, found, strict=True)):
        _compare(model, f"output {i}", a, b)
        _check_rows(model, i, a, rows)
    for spec, a, b in zip(inputs.specs, given, copies, strict=True):
        _compare(model, f"argument {spec.name!r}, which it writes to,", a, b)
    _unpack_output(gm, got)
    own = pytree.tree_structure(expected)
    unknown = next((v for v in pytree.tree_leaves(expected) if isinstance(v, (dict, list, tuple))), None)
    if unknown is not None:
        raise TraceError(
            f"{type(model).__name__} returns a {type(unknown).__name__}, which torch's pytrees do not know: return "
            "tensors, tuples, lists or dicts of them, or register the type with torch.utils._pytree"
        )
    written = [t._version for t in copies] != versions
    returns = None if own == structure else own
    return {"written": written, "updated": updated, "rewritten": rewritten, "returns": returns}


def _check_weights(model: nn.Module, weights: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Raise TraceError, naming a parameter, if forward() has written to it; all are as they were afterwards."""
    written = [path for path, (p, kept) in weights.items() if not torch.equal(p, kept)]
    for path in written:
        parameter, kept = weights[path]
        parameter.detach().copy_(kept)
    if written:
        raise TraceError(
            f"forward() of {type(model).__name__} writes to parameter {written[0]!r}, which a training step must not: "
            "write to it outside of forward(), for example after optimizer.step() (Embedding: leave max_norm= out)"
        )


def _rewritten(model: nn.Module, mine: nn.Module, traced: fx.GraphModule, changed: Sequence[Tensor]) -> tuple[str, ...]:
    """Return the paths of buffers that each call writes and that something may save for backward.

    Those are what the graph fetches, and what normalisation from outside torch holds; torch's own saves no state of
    its own. Raises TraceError for a write to a tensor that is no buffer: a graph would keep it from call to call.
    """
    memory = {storage_id(t) for t in changed}
    held = {storage_id(b) for b in mine.buffers()}
    found = {path: t for path, t in fetched(traced).items() if isinstance(t, Tensor) and storage_id(t) in memory}
    for path, tensor in found.items():
        if storage_id(tensor) not in held:
            raise TraceError(
                f"forward() of {type(model).__name__} writes in place to {path!r}, a constant of the graph that would "
                "keep what was written from call to call: make it from an input (x.new_zeros(...)), or register it "
                "as a buffer if it is meant to last"
            )
    for path, module in mine.named_modules():
        if isinstance(module, _NormBase) and not type(module).__module__.startswith("torch."):
            own = ((f"{path}.{name}".removeprefix("."), b) for name, b in module.named_buffers())
            found |= {name: b for name, b in own if storage_id(b) in memory}
    return tuple(found)


def _unpack_output(gm: fx.GraphModule, value: Any) -> None:
    """Let the graph return tensors in plain containers where a node makes a container of them, as named tuples do."""
    output = gm.graph.output_node()

    def unpack(made: Any, value: Any) -> Any:
        if isinstance(made, fx.Node) and isinstance(value, (tuple, list, dict)):
            keys = value.keys() if isinstance(value, dict) else range(len(value))
            parts = {k: gm.graph.call_function(operator.getitem, (made, k)) for k in keys}
            made = parts if isinstance(value, dict) else [*parts.values()]
        if isinstance(value, dict):
            return {k: unpack(made[k], v) for k, v in value.items()}
        if isinstance(value, (tuple, list)):
            items = [unpack(m, v) for m, v in zip(made, value, strict=True)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if not isinstance(value, Tensor):
            return value  # a constant, such as a field of a named tuple that is None
        if isinstance(made, fx.Node):
            made.meta.setdefault("fxsplit_shape", tensor_text(value))
        return made

    with gm.graph.inserting_before(output):
        output.args = (unpack(output.args[0], value),)
    gm.recompile()


def _check_rows(model: nn.Module, position: int, value: Any, rows: int) -> None:
    """Raise InputError unless an output is a batch, or the same for every microbatch."""
    if isinstance(value, Tensor):
        if value.ndim == 0 or value.shape[0] != rows:
            raise InputError(
                f"output {position} of {type(model).__name__} has shape {tuple(value.shape)} for {rows} rows: outputs "
                "of microbatches are joined on dimension 0; return one row for each row of the input, reduce outside"
            )
    elif value is not None and not isinstance(value, (str, bool)):
        raise InputError(
            f"output {position} of {type(model).__name__} is {value!r}, neither a tensor nor the same for every "
            "microbatch: return tensors only"
        )


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
    return tensor_text(value) if isinstance(value, Tensor) else type(value).__name__


def _close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal but for non-deterministic kernels."""
    if not a.is_floating_point() or a.numel() == 0:
        return bool(torch.equal(a, b))
    size = float(torch.nan_to_num(a, posinf=0.0, neginf=0.0).abs().max())
    return bool(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * size, equal_nan=True))


class _ShapeRecorder(fx.Interpreter):
    """Notes dtype and shape of every value in the nodes of `graph`, of which `gm` may be a copy, for dumps."""

    def __init__(self, gm: fx.GraphModule, original: fx.GraphModule) -> None:
        super().__init__(gm)
        self._nodes = {n.name: n for n in original.graph.nodes}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        text = tensor_text(value) if isinstance(value, Tensor) else type(value).__name__
        self._nodes[n.name].meta["fxsplit_shape"] = text
        return value
