"""Fingerprints of a graph and its modules, to detect a pass that edits them in place.

An IR must not change: earlier IRs are kept, other passes and the other mode start from them, and the modules are the
user's own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from fxsplit.ir.graph import IR
from fxsplit.torch_internals.autograd.leaves import list_gradient_hooks
from fxsplit.torch_internals.fake.values import has_values
from fxsplit.torch_internals.fx.interpret import count_writes
from fxsplit.torch_internals.nn.containers import HOOKS

MOST_READ = 100_000
"""How many elements of a weight are read at most, evenly spaced."""

_PLAIN = (bool, int, float, str, type(None), tuple)


def take_fingerprint(ir: IR) -> dict[str, Any]:
    """Return a fingerprint of an IR, its modules and its weights, as a dict.

    Each key names a part of the IR for messages, and each value can be compared.
    """
    facts = {f"fact {kind.__name__}": _read_fact(fact) for kind, fact in ir.facts.items()}
    return _read_graph(ir.gm) | facts


def find_edit(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return the name of the first difference between two fingerprints, or None if they are equal."""
    return next((name for name in {**before, **after} if before.get(name) != after.get(name)), None)


def _read_graph(gm: fx.GraphModule) -> dict[str, Any]:
    """Return the part of the fingerprint for the graph, its modules and its weights."""
    found: dict[str, Any] = {}
    weights: dict[int, tuple[str, Tensor]] = {}
    for path, module in gm.named_modules():
        if isinstance(module, fx.GraphModule):
            found |= _list_nodes(module)
        found |= {f"module {path!r}" if path else "the graph's modules": tuple(_list_held(module))}
        found |= {f"attribute {f'{path}.{k}'.removeprefix('.')!r}": v for k, v in _list_attributes(module)}
        for name, weight in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            weights.setdefault(id(weight), (f"{path}.{name}".removeprefix("."), weight))
    return found | {f"the values of {path!r}": _read_values(weight) for path, weight in weights.values()}


def _list_nodes(gm: fx.GraphModule) -> dict[str, Any]:
    """Return a comparable value for each node of a graph, in order."""
    found = {}
    for position, node in enumerate(gm.graph.nodes):
        # Pins and messages find a node by its stack of modules, and dumps show its shape.
        notes = (node.meta.get("fxsplit_shape"), repr(node.meta.get("nn_module_stack")))
        target = node.target if isinstance(node.target, str) else id(node.target)
        found[f"node {node.name!r}"] = (position, node.op, target, repr(node.args), repr(node.kwargs), notes)
    return found


def _list_held(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the name and the identity of each submodule, parameter and buffer that a module holds directly."""
    for held in (module._modules, module._parameters, module._buffers):
        yield from ((name, id(value)) for name, value in held.items())


def _list_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the mode of a module, and the attributes of torch's own modules that control their computation."""
    yield "training", module.training
    yield "forward", id(vars(module).get("forward"))
    yield from ((kind, tuple(vars(module)[kind])) for kind in HOOKS)
    # A module of the user may count its calls. A pass that runs the graph changes such a counter, which is no edit.
    if type(module).__module__.startswith("torch.nn."):
        yield from ((k, repr(v)) for k, v in vars(module).items() if k[0] != "_" and isinstance(v, _PLAIN))


def _read_values(weight: Tensor) -> tuple[Any, ...]:
    """Return a value that changes if a weight is written to: its version counter, a hash and the sum of its values."""
    # Hooks count as values, since they change gradients.
    version = count_writes(weight), tuple(tuple(hooks) for hooks in list_gradient_hooks(weight) if hooks)
    if not has_values(weight) or weight.layout is not torch.strided or weight.is_complex() or not weight.numel():
        return version, weight.requires_grad
    values = weight.detach()
    # A slice of contiguous memory is a view. Copying all of another layout would cost more than the check is worth.
    if values.numel() > MOST_READ:
        values = values.view(-1)[:: values.numel() // MOST_READ] if values.is_contiguous() else values[:1]
    # The hash misses a change of all elements of a weight if they are equal and even in number, so the sum is compared
    # too. The sum is a text because NaN != NaN.
    hashed, total = torch.hash_tensor(values).view(torch.int64).item(), repr(values.double().sum().item())
    return version, weight.requires_grad, hashed, total


def _read_fact(value: Any) -> Any:
    """Return a value that changes if anything inside `value` changes."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.dtype.str, value.shape, zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data)
    if isinstance(value, Tensor):
        return _read_values(value)
    if isinstance(value, Mapping):
        return tuple((str(key), _read_fact(v)) for key, v in value.items())
    if isinstance(value, (tuple, list, np.ndarray)):
        return tuple(map(_read_fact, value))
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value) if isinstance(value, (*_PLAIN, frozenset)) else id(value)
    # Private fields cache results, and are no part of the fact.
    return tuple(_read_fact(getattr(value, f.name)) for f in fields(value) if f.name[0] != "_")
