"""Capture a model for one microbatch and check the graph against the model before anybody builds on it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxsplit.errors import InputError, TraceError
from fxsplit.inputs import Example, Inputs
from fxsplit.ir import IR
from fxsplit.observe import on_one_device, preserved, tensor_text
from fxsplit.structures import rebuild
from fxsplit.trace.tracer import symbolic_trace

TOLERANCE = 1e-5
"""The same operators in the same order give the same bits; only non-deterministic kernels need any tolerance."""


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], rows: int) -> IR:
    """Return the IR of `model(*args, **kwargs)` in its present mode, with its first `rows` rows as the Example.

    Raises TraceError when tracing fails or when the graph computes anything else than the model does, InputError when
    an output is not batched on dimension 0.
    """
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
    try:
        yield
    finally:
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)


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
    """Return whether two captures of one model are the same operations on the same modules."""
    return _skeleton(a) == _skeleton(b)


def _skeleton(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Return every node without what is unique to one graph."""
    return [(n.op, n.name, n.target, repr(n.args), repr(n.kwargs)) for n in gm.graph.nodes]


def _check(model: nn.Module, gm: fx.GraphModule, inputs: Inputs, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Run the model and the graph on the same rows, without a trace on either, and compare all they leave behind.

    Returns what the Example is to know of it.
    """
    rows = int(tensors[0].shape[0])
    both, tensors = on_one_device(nn.ModuleList([model, gm]), tensors)
    mine, traced = both[0], both[1]
    assert isinstance(traced, fx.GraphModule)
    given, copies = ([t.detach().clone() for t in tensors] for _ in range(2))
    versions = [t._version for t in copies]
    with torch.no_grad():
        with preserved(mine):
            call = inputs.call(given)
            try:
                expected = mine(*call.args, **call.kwargs)
            except Exception as error:
                error.add_note(f"fxsplit called the unsplit model with one microbatch of {rows} rows")
                raise
            state = [b.clone() for b in mine.buffers()]
        fetched = {
            str(n.target): operator.attrgetter(str(n.target))(traced) for n in traced.graph.nodes if n.op == "get_attr"
        }
        before = {path: t._version for path, t in fetched.items() if isinstance(t, Tensor)}
        with preserved(mine):
            got = rebuild(_ShapeRecorder(traced, gm).run(*copies), lambda leaf: leaf)
            for (name, buffer), value in zip(mine.named_buffers(), state, strict=True):
                _compare(model, f"buffer {name!r}", value, buffer)
            rewritten = tuple(path for path, version in before.items() if fetched[path]._version != version)
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
    written = [t._version for t in copies] != versions
    return {"written": written, "rewritten": rewritten, "returns": None if own == structure else own}


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
        if isinstance(made, fx.Node):
            made.meta.setdefault("fxsplit_shape", tensor_text(value) if isinstance(value, Tensor) else "")
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
