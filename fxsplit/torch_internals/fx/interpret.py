"""Interpret a graph node by node, without lasting side effects.

Before a pipeline exists, the check of a captured graph, its observation and its timing all run a graph in this way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fxsplit.torch_internals.autograd.leaves import mute
from fxsplit.torch_internals.fake.snapshot import keep_values
from fxsplit.torch_internals.fake.values import is_fake
from fxsplit.torch_internals.random.generators import keep_torch_generators
from fxsplit.torch_internals.tensors.sparse_layouts import list_parts


class Interpreter(fx.Interpreter):
    """Interprets a graph as its generated code would run, with mutable lists and dicts as arguments.

    fx.Interpreter passes fx's immutable containers, which fail in a function that appends to its argument.
    """

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments and keyword arguments of a node."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return tuple(_make_mutable(a) for a in args), {name: _make_mutable(a) for name, a in kwargs.items()}


@contextmanager
def preserve(module: nn.Module, devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Restore the buffers of `module` and the random generators after the block. Gradient hooks are muted in the block.

    The generators of all devices in use and of `devices` are restored, even if the block is the first to use them.
    """
    # The context of fake tensors restores generators itself, and a generator's state cannot be read inside it.
    imagined = any(is_fake(w) for w in (*module.parameters(), *module.buffers()))
    # Hooks on parameters are the user's, and expect gradients of a real batch.
    with (
        keep_values(module.buffers()),
        nullcontext() if imagined else keep_torch_generators(devices),
        mute(module.parameters()),
    ):
        yield


def find_target(gm: nn.Module, node: fx.Node) -> Any:
    """Return the module, tensor, function or method name that a node calls or fetches."""
    return node.target if node.op in ("call_function", "call_method") else attrgetter(str(node.target))(gm)


def get_storage_id(tensor: Tensor) -> int:
    """Return a number that is the same for two tensors exactly if they share memory, as `x` and `x.view(-1)` do.

    The number can be reused once the storage is freed, so keep the tensor as long as the number.
    """
    # The address of the storage object: the data address is 0 for all tensors on the meta device.
    return int(list_parts(tensor)[0].untyped_storage()._cdata)


def count_writes(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to, by torch's count, or None for a tensor made in inference mode."""
    return None if tensor.is_inference() else tensor._version


def are_writes_counted(tensor: Tensor) -> bool:
    """Return whether torch counts all writes to a tensor. It does not see writes by numpy or by another process."""
    if tensor.is_inference():
        return False
    # Memory shared with numpy or another process is not torch's own, and torch cannot resize it.
    return tensor.device.type != "cpu" or all(part.untyped_storage().resizable() for part in list_parts(tensor))


def describe_tensor(tensor: Tensor) -> str:
    """Return dtype and shape, for example `float32[8, 64]`."""
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"


def _make_mutable(value: Any) -> Any:
    """Convert fx's immutable containers to plain lists and dicts. Containers made by a node stay."""
    if isinstance(value, immutable_list):
        return [_make_mutable(v) for v in value]
    if isinstance(value, immutable_dict):
        return {key: _make_mutable(v) for key, v in value.items()}
    # Exclude named tuples made by a node, so that they keep their type.
    return tuple(_make_mutable(v) for v in value) if type(value) is tuple else value
