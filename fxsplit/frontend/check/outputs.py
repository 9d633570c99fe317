"""Bring the output of a graph into the form that stages need: tensors and constants in plain containers."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from fxsplit.errors import InputError
from fxsplit.frontend.subject import Runnable
from fxsplit.torch_internals.fx.interpret import describe_tensor


def refuse_objects(here: Runnable, outputs: Sequence[Any]) -> None:
    """Raise InputError for an output of the model that is neither a tensor nor a constant.

    outputs: the model's outputs, without their containers.
    """
    for i, value in enumerate(outputs):
        if value is not None and not isinstance(value, (Tensor, str, bool, int, float)):
            raise InputError(
                f"output {i} of {here.name} is {value!r}, neither a tensor nor the same for every microbatch: return "
                "tensors only"
            )


def unpack_output(gm: fx.GraphModule, value: Any) -> None:
    """Change the graph's output so that it holds tensors in plain containers.

    value: the value that the graph returns.
    If a node's value is a container, for example the named tuple of torch.sort, the node becomes a container of nodes:
    `(getitem(sort, 0), getitem(sort, 1))`. Stages can hand on only tensors.
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
            # New nodes did not exist when the graph ran and its shapes were noted.
            made.meta.setdefault("fxsplit_shape", describe_tensor(value))
        return made

    with gm.graph.inserting_before(output):
        output.args = (unpack(output.args[0], value),)
    gm.recompile()
