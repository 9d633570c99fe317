"""Interpret a graph node by node, and leave no trace of having run it.

The check of a captured graph, its observation and its timing all run it this way, before a pipeline exists.
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
from fxsplit.torch_internals.fake.fake_weights import is_fake, keep_values
from fxsplit.torch_internals.random.generators import keep_torch_generators
from fxsplit.torch_internals.tensors.layouts import list_parts


class Interpreter(fx.Interpreter):
    """Interprets a graph as its code would run: a list argument is a plain list, which a function may append to.

    fx.Interpreter hands on the immutable containers that fx keeps in nodes, and such a function would fail.
    """

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments and keyword arguments of a node."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return tuple(_make_mutable(a) for a in args), {name: _make_mutable(a) for name, a in kwargs.items()}


@contextmanager
def preserve(module: nn.Module, devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Restore the buffers of `module` and the random generators after the block, and run no gradient hooks in it.

    The generators are those of all devices in use, and of `devices`, which the block may be the first to use.
    """
    # Fake tensors come with a block that restores generators itself, and a generator's state cannot be read there.
    imagined = any(is_fake(w) for w in (*module.parameters(), *module.buffers()))
    # Hooks on parameters are the user's, and the gradients here are of no batch.
    with (
        keep_values(module.buffers()),
        nullcontext() if imagined else keep_torch_generators(devices),
        mute(module.parameters()),
    ):
        yield


def find_target(gm: nn.Module, node: fx.Node) -> Any:
    """Return what `node` calls or fetches: a module, a tensor, a function, or the name of a method."""
    return node.target if node.op in ("call_function", "call_method") else attrgetter(str(node.target))(gm)


def get_storage_id(tensor: Tensor) -> int:
    """Return a number that two tensors share exactly if they share memory, as `x` and `x.view(-1)` do.

    The number is free for other memory once nothing holds the storage: keep the tensor as long as the number.
    """
    # The address of the storage object: unlike that of the data, it is not 0 for tensors on the meta device.
    return int(list_parts(tensor)[0].untyped_storage()._cdata)


def count_writes(tensor: Tensor) -> int | None:
    """Return how often a tensor has been written to, as far as torch counts; None for one made in inference mode."""
    return None if tensor.is_inference() else tensor._version


def are_writes_counted(tensor: Tensor) -> bool:
    """Return whether `count_writes` counts all writes: not those to memory of numpy, or of another process."""
    if tensor.is_inference():
        return False
    # Others that may write there have memory that is not torch's own, which torch cannot resize.
    return tensor.device.type != "cpu" or all(part.untyped_storage().resizable() for part in list_parts(tensor))


def describe_tensor(tensor: Tensor) -> str:
    """Return dtype and shape, for example `float32[8, 64]`."""
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"


def _make_mutable(value: Any) -> Any:
    """Return plain lists and dicts in place of fx's immutable ones; a container that a node has made stays itself."""
    if isinstance(value, immutable_list):
        return [_make_mutable(v) for v in value]
    if isinstance(value, immutable_dict):
        return {key: _make_mutable(v) for key, v in value.items()}
    # A named tuple that a node has made keeps its type.
    return tuple(_make_mutable(v) for v in value) if type(value) is tuple else value
