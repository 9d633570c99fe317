"""Find the dimensions of values between stages that depend on the number of rows, by running stages on shapes.

torch.compile compiles a stage for the sizes that it is given first, and again for other sizes. A compiled stage marks
the dimensions found here as dynamic, so that a batch with another number of rows compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxsplit.errors import FxsplitError
from fxsplit.frontend.restore.no_trace_left import restore_model
from fxsplit.ir.facts.capture.call import Inputs
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.stages import Stage, Stages
from fxsplit.runtime.stage.compiled_stage import RowDims
from fxsplit.torch_internals.error_texts import is_out_of_memory
from fxsplit.torch_internals.fake.runnable import make_runnable
from fxsplit.torch_internals.nn.batch_norm import note_nothing
from fxsplit.torch_internals.scopes.undo import restore_after
from fxsplit.torch_internals.torch_compile.runs_uncompiled import RunsUncompiled

REFUSED = (FxsplitError, RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError)
"""Errors of a stage that cannot run on shapes, or cannot run on another number of rows."""


def find_row_dims(model: nn.Module, stages: Stages, example: Example) -> tuple[RowDims, ...]:
    """Return, for each input of each stage, the dimensions that depend on the number of rows.

    An input that is a number, and depends on it, has None. If the stages do not run on shapes, only the dimensions of
    the model's own inputs are found.
    """
    inputs, rows = example.inputs, max(example.rows, 2)
    try:
        with torch.no_grad(), restore_model(model), note_nothing():
            found = [_run_on_shapes(stages, _resize(inputs, example.tensors, n)) for n in (rows, rows + 1)]
    except REFUSED as error:
        if is_out_of_memory(error):
            raise
        own = [() if spec.cut.dim is None else (spec.cut.dim,) for spec in inputs.specs]
        first = own + [()] * (len(stages[0].inputs) - len(own))
        return (tuple(first), *(((),) * len(stage.inputs) for stage in stages.stages[1:]))
    given = zip(*(shapes.given for shapes in found), strict=True)
    for module, output in found[0].apart.items():
        module.row_dims = _compare(output, found[1].apart[module]) or ()
    return tuple(tuple(map(_compare, *values)) for values in given)


def _resize(inputs: Inputs, tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Return tensors of the same kind, without values, that have `rows` rows."""
    made = []
    for spec, tensor in zip(inputs.specs, tensors, strict=True):
        one = torch.empty_like(tensor, device="meta", requires_grad=False)
        if spec.cut.dim is not None:
            shape = [rows * spec.cut.each if d == spec.cut.dim else size for d, size in enumerate(tensor.shape)]
            one = one.new_empty(shape)
        made.append(one)
    return made


class _Shapes(NamedTuple):
    """Tensors without values: the inputs of each stage (`given`), and the outputs of uncompiled modules (`apart`)."""

    given: list[list[Any]]
    apart: dict[RunsUncompiled, Any]


def _run_on_shapes(stages: Stages, tensors: Sequence[Tensor]) -> _Shapes:
    """Return the values that pass through the stages for these inputs of the model."""
    found = _Shapes([], {})
    values: list[Any] = list(tensors)
    for stage in stages.stages:
        # Inputs that are numbers have defaults.
        defaults = [n.args[0] for n in stage.module.graph.find_nodes(op="placeholder")[len(values) :]]
        found.given.append([*values, *defaults])
        shapes = [v for v in values if isinstance(v, Tensor)]
        with (
            _keep_outputs(stage, found.apart),
            make_runnable(stage.module, shapes, from_shapes=True, device=stage.torch_device) as (module, fakes),
        ):
            of = iter(fakes)
            outputs = module(*[next(of) if isinstance(v, Tensor) else v for v in values])
            values = [_forget_values(v) for v in outputs]
    return found


@contextmanager
def _keep_outputs(stage: Stage, kept: dict[RunsUncompiled, Any]) -> Iterator[None]:
    """Keep the outputs of modules of a stage that run uncompiled."""

    def keep(module: Any, args: Any, output: Any) -> None:
        kept[module] = _forget_values(output)

    handles = [m.register_forward_hook(keep) for m in stage.module.children() if isinstance(m, RunsUncompiled)]

    def put_back() -> None:
        for handle in handles:
            handle.remove()

    with restore_after(put_back):
        yield


def _forget_values(value: Any) -> Any:
    """Return a tensor without values that has the shape and strides of a fake tensor; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _compare(a: Any, b: Any) -> tuple[int, ...] | None:
    """Return the dimensions in which two tensors differ in size; None for two numbers that differ."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return tuple(d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n)
    return () if a == b else None
