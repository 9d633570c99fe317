"""What a graph returns: tensors in plain containers, each with the dimension that microbatches are joined on."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxsplit.errors import InputError
from fxsplit.frontend.subject import Runnable
from fxsplit.ir.facts.chunks import UNJOINED
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.containers import to_plain_outputs
from fxsplit.torch_internals.interpret import describe_tensor, preserve


def find_output_dims(here: Runnable, outputs: Sequence[Any], is_cut: bool) -> tuple[int | None, ...]:
    """Return the dimension of each output tensor that holds the rows; None for a number, of which the mean is taken.

    `outputs` are the flat outputs of the model for the rows of `here`. An output of shape (4, 6) for 4 rows may be a
    batch, or a table that happens to be as long. So the model runs once more with every row twice: the dimension that
    is then twice as long holds the rows. An output that is no batch is UNJOINED where a batch stays whole. Where it
    `is_cut`, such an output raises InputError, and so does a Python number that depends on the rows.
    """
    likely = [_find_likely_dims(here, i, value, is_cut) for i, value in enumerate(outputs)]
    doubled: Sequence[Any] = outputs
    # Nothing to tell apart: the model need not run once more.
    if any(likely) or any(_is_number(value) for value in outputs):
        with torch.no_grad(), preserve(here.model):
            doubled = pytree.tree_leaves(to_plain_outputs(here.run_model(*here.clone_doubled())))
    found: list[int | None] = []
    for i, (dims, value, other) in enumerate(zip(likely, outputs, doubled, strict=True)):
        if _is_number(value) and value != other:
            raise InputError(
                f"output {i} of {here.name} is {value!r} for {here.rows} rows and {other!r} for twice as many, "
                "and not the same for every microbatch: return tensors only"
            )
        if not isinstance(value, Tensor):
            continue
        # Only a dimension that has doubled holds rows, and exactly one must have.
        if dims:
            dims = [d for d in dims if isinstance(other, Tensor) and other.shape[d : d + 1] == (2 * here.rows,)]
            if len(dims) != 1 and is_cut:
                raise _make_no_batch_error(here, i, value)
            dims = dims if len(dims) == 1 else [UNJOINED]
        found.append(dims[0] if dims else None if value.ndim == 0 else UNJOINED)
    return tuple(found)


def _find_likely_dims(here: Runnable, position: int, value: Any, is_cut: bool) -> list[int]:
    """Return the dimensions of an output that are as long as the batch; none for a number.

    Raises InputError where a batch `is_cut` and the output has no such dimension, and for what is not the same for
    every microbatch.
    """
    if isinstance(value, Tensor):
        dims = [d for d, length in enumerate(value.shape) if length == here.rows]
        # A floating point scalar, such as a loss, can be averaged over microbatches.
        if is_cut and not dims and not (value.ndim == 0 and value.is_floating_point()):
            raise _make_no_batch_error(here, position, value)
        return dims
    if value is not None and not isinstance(value, (str, bool, int, float)):
        raise InputError(
            f"output {position} of {here.name} is {value!r}, neither a tensor nor the same for every "
            "microbatch: return tensors only"
        )
    return []


def _is_number(value: Any) -> bool:
    """Return whether an output is a Python number, which may count rows; a bool is a flag."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _make_no_batch_error(here: Runnable, position: int, value: Tensor) -> InputError:
    """Return the error for an output that cannot be joined."""
    return InputError(
        f"output {position} of {here.name} has shape {tuple(value.shape)} for {here.rows} rows: outputs of "
        "microbatches are joined on the dimension that holds the rows (or averaged, if they are single numbers such as "
        "a loss); return one row for each row of the input and reduce outside, or compile with n_microbatches=1"
    )


def unpack_output(gm: fx.GraphModule, value: Any) -> None:
    """Change the graph's output so that it holds tensors in plain containers.

    `value` is what the graph returns. A node whose value is a container, for example the named tuple that torch.sort
    returns, becomes a container of nodes: `(getitem(sort, 0), getitem(sort, 1))`. Stages hand on tensors alone.
    """
    output = gm.graph.output_node()

    def unpack(made: Any, value: Any) -> Any:
        if isinstance(made, fx.Node) and isinstance(value, (tuple, list, dict)):
            keys = value.keys() if isinstance(value, dict) else range(len(value))
            # A container is one node, and each of its parts is another, picked by position or key.
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
            # Nodes made here were not there when the graph ran and its shapes were noted.
            made.meta.setdefault("fxsplit_shape", describe_tensor(value))
        return made

    with gm.graph.inserting_before(output):
        output.args = (unpack(output.args[0], value),)
    gm.recompile()
