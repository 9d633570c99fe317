"""Capture a model for one microbatch: the way from nn.Module and example to the IR that passes work on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from fxsplit.errors import InputError, TraceError
from fxsplit.frontend.choose import choose_graph
from fxsplit.frontend.no_trace_left import restore_model
from fxsplit.frontend.subject import Subject
from fxsplit.ir.facts.call import Inputs
from fxsplit.ir.facts.chunks import Chunks
from fxsplit.ir.facts.example import Example
from fxsplit.ir.graph import IR
from fxsplit.ir.imports import import_whole
from fxsplit.torch_internals.fake_weights import lacks_values

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
"""What torch itself imports while it traces or exports a model for the first time in a process."""


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rows: int,
    chunks: Chunks | None = None,
    leaves: Sequence[str] = (),
    from_shapes: bool = False,
) -> IR:
    """Return the IR of `model(*args, **kwargs)` in its present mode, for microbatches of its first `rows` rows.

    The IR knows its Example, its Scope and its CallEffects. `chunks` states by argument where the batch is, see
    `Inputs.of`. `leaves` are paths of submodules that stay whole. `from_shapes`: nothing is computed, and the graph is
    checked as far as shapes tell; a model with weights on the meta device is always captured so. Raises TraceError when
    no front end can follow the model, or when a graph computes anything else than the model does; InputError when an
    output is no batch.
    """
    import_whole(LATE, if_there=True)
    _refuse_unknown_weights(model)
    inputs, tensors = Inputs.of(model, args, kwargs, chunks)
    subject = Subject(model, inputs, tensors, rows, tuple(leaves), from_shapes or lacks_values(model))
    # Copied before anything runs: forward() may write to its arguments.
    sample = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in subject.take_rows(rows))
    # Around all attempts: a check runs the model as well.
    with restore_model(model):
        graph, effects = choose_graph(subject)
    _set_modes(graph.gm, model)
    ir = IR(graph.gm, model=subject.name, mode="train" if model.training else "eval")
    return ir.learn(Example(inputs, sample, subject.from_shapes), graph.scope, effects)


def _set_modes(gm: fx.GraphModule, model: nn.Module) -> None:
    """Give the containers that a graph has of its own the modes of the model's modules at their paths."""
    # Exported graphs always say that they train. Modules that the graph calls are the model's own, and stay untouched.
    own = dict(model.named_modules(remove_duplicate=False))
    known = {id(module) for module in own.values()}
    for path, module in gm.named_modules():
        if id(module) not in known:
            module.training = own.get(path, model).training


def _refuse_unknown_weights(model: nn.Module) -> None:
    """Raise InputError for a weight without a shape, and TraceError for a submodule that hides its weights."""
    # A lazy weight gets its shape from the first call, which must not be one of fxsplit's.
    lazy = next((path for path, w in (*model.named_parameters(), *model.named_buffers()) if is_lazy(w)), None)
    if lazy is not None:
        raise InputError(f"{lazy!r} has no shape yet: call {type(model).__name__} once, then compile it")
    # torch.jit keeps parameters in C++, where a stage cannot share them with the model.
    scripted = next((path for path, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise TraceError(
            f"submodule {scripted!r} of {type(model).__name__} is from torch.jit, which keeps its parameters to itself:"
            " give the model the module that it was scripted from"
        )
