"""Interpret a graph node by node, and leave no trace of having run it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fxsplit.torch_internals.fake_weights import Snapshot, is_fake
from fxsplit.torch_internals.grad_leaves import mute


class Interpreter(fx.Interpreter):
    """Interprets a graph as its code would run: lists and dicts in it are plain, and functions may write to them."""

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a node."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return tuple(_mutable(a) for a in args), {name: _mutable(a) for name, a in kwargs.items()}


@contextmanager
def preserve(module: nn.Module) -> Iterator[None]:
    """Restore the buffers of `module` and the random generators after the block, and run no gradient hooks in it.

    Observing must leave no trace.
    """
    buffers = Snapshot(module.buffers())
    gpus = sorted({b.device.index for b in module.buffers() if b.device.type == "cuda"})
    imagined = any(is_fake(w) for w in (*module.parameters(), *module.buffers()))  # they restore generators
    try:
        with nullcontext() if imagined else torch.random.fork_rng(devices=gpus), mute(module.parameters()):
            yield
    finally:
        buffers.restore()


def find_target(gm: nn.Module, node: fx.Node) -> Any:
    """Return what `node` calls or fetches: a module, a tensor, a function, or the name of a method."""
    return node.target if node.op in ("call_function", "call_method") else attrgetter(str(node.target))(gm)


def get_storage_id(tensor: Tensor) -> int:
    """Return a number that two tensors share exactly while they share memory."""
    return int(tensor.untyped_storage()._cdata)


def describe_tensor(tensor: Tensor) -> str:
    """Return dtype and shape, for example `float32[8, 64]`."""
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"


def _mutable(value: Any) -> Any:
    """Return plain lists and dicts in place of those that fx keeps in nodes; what nodes have made stays what it is."""
    if isinstance(value, immutable_list):
        return [_mutable(v) for v in value]
    if isinstance(value, immutable_dict):
        return {key: _mutable(v) for key, v in value.items()}
    return tuple(_mutable(v) for v in value) if type(value) is tuple else value
