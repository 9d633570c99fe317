"""What a graph returns: tensors in plain containers, each with the dimension that microbatches are joined on."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxsplit.errors import FxsplitError, InputError, TraceError
from fxsplit.ir.facts.call import Inputs
from fxsplit.ir.facts.chunks import UNJOINED
from fxsplit.torch_internals.containers import to_plain_outputs
from fxsplit.torch_internals.interpret import Interpreter, describe_tensor, preserve


def find_output_dims(
    model: nn.Module, mine: nn.Module, inputs: Inputs, tensors: Sequence[Tensor], outputs: Sequence[Any], cut: bool
) -> tuple[int | None, ...]:
    """Return the dimension of each output tensor that holds the rows; None for a number, of which the mean is taken.

    That is one which becomes twice as long where the model, `mine`, is given every row twice. What is neither a batch
    nor the same for every microbatch is UNJOINED where a batch is not `cut`; otherwise raises InputError.
    """
    rows = inputs.rows(tensors)
    likely = [_dims(model, i, value, rows, cut) for i, value in enumerate(outputs)]
    twice: Sequence[Any] = outputs
    numbers = [value for value in outputs if _is_number(value)]
    if any(likely) or numbers:
        with torch.no_grad(), preserve(mine):
            call = inputs.call([t.detach().clone() for t in inputs.doubled(tensors)])
            twice = pytree.tree_leaves(to_plain_outputs(mine.forward(*call.args, **call.kwargs)))
    found: list[int | None] = []
    for i, (dims, value, other) in enumerate(zip(likely, outputs, twice, strict=True)):
        if _is_number(value) and value != other:
            raise InputError(
                f"output {i} of {type(model).__name__} is {value!r} for {rows} rows and {other!r} for twice as many, "
                "and not the same for every microbatch: return tensors only"
            )
        if not isinstance(value, Tensor):
            continue
        if dims:
            dims = [d for d in dims if isinstance(other, Tensor) and other.shape[d : d + 1] == (2 * rows,)]
            if len(dims) != 1 and cut:
                raise _no_batch(model, i, value, rows)
            dims = dims if len(dims) == 1 else [UNJOINED]
        found.append(dims[0] if dims else None if value.ndim == 0 else UNJOINED)
    return tuple(found)


def _dims(model: nn.Module, position: int, value: Any, rows: int, cut: bool) -> list[int]:
    """Return the dimensions of an output that are as long as the batch; none for a number."""
    if isinstance(value, Tensor):
        dims = [d for d, length in enumerate(value.shape) if length == rows]
        if cut and not dims and not (value.ndim == 0 and value.is_floating_point()):
            raise _no_batch(model, position, value, rows)
        return dims
    if value is not None and not isinstance(value, (str, bool, int, float)):
        raise InputError(
            f"output {position} of {type(model).__name__} is {value!r}, neither a tensor nor the same for every "
            "microbatch: return tensors only"
        )
    return []


def _is_number(value: Any) -> bool:
    """Return whether an output is a number of Python's."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _no_batch(model: nn.Module, position: int, value: Tensor, rows: int) -> InputError:
    """Return the error for an output that cannot be joined."""
    return InputError(
        f"output {position} of {type(model).__name__} has shape {tuple(value.shape)} for {rows} rows: outputs of "
        "microbatches are joined on the dimension that holds the rows (or averaged, if they are single numbers such as "
        "a loss); return one row for each row of the input and reduce outside, or compile with n_microbatches=1"
    )


def unpack_output(gm: fx.GraphModule, value: Any) -> None:
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
            made.meta.setdefault("fxsplit_shape", describe_tensor(value))
        return made

    with gm.graph.inserting_before(output):
        output.args = (unpack(output.args[0], value),)
    gm.recompile()


def find_submodule(node: fx.Node) -> str | None:
    """Return the path of the innermost submodule that a node was made in; None for the model itself."""
    paths = [str(path) for path, *_ in (node.meta.get("nn_module_stack") or {}).values()]
    return next((path for path in reversed(paths) if path), None)


class Runner(Interpreter):
    """Runs the graph of a model that has just run by itself: where the graph fails, capturing it has lost something."""

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; raises TraceError naming it."""
        try:
            return super().run_node(n)
        except FxsplitError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TraceError(
                f"node {n.name!r} of the graph does not run, although the model does ({reason}): keep the module that "
                f"it is from whole, fxsplit.leaf({find_submodule(n) or 'its.path'!r})",
                submodule=find_submodule(n),
            ) from error


class ShapeRecorder(Runner):
    """Notes dtype and shape of every value in the nodes of `graph`, of which `gm` may be a copy, for dumps."""

    def __init__(self, gm: fx.GraphModule, original: fx.GraphModule) -> None:
        super().__init__(gm)
        self._nodes = {n.name: n for n in original.graph.nodes}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and note what it made."""
        value = super().run_node(n)
        text = describe_tensor(value) if isinstance(value, Tensor) else type(value).__name__
        self._nodes[n.name].meta["fxsplit_shape"] = text
        return value
