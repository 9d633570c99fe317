"""RemoteParameter: parameters and buffers of the model that other ranks have.

A weight that is sent away stays the same Python object, which the model and optimizers hold. What torch keeps behind
the object is exchanged for a tensor without memory, and the object's class for one that is derived from its own and
from `RemoteTensor`. A weight that is brought back is as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import _recursive

from fxsplit.torch_internals.distributed.remote_tensors import Owner, RemoteTensor, exchange, make_remote

OF_REMOTE = ("owner", "lent", "aside")
"""Attributes that a weight has only while it is away."""


class RemoteParameter(RemoteTensor, nn.Parameter):
    """A parameter that another rank has."""

    aside: Tensor | None = None
    """Its gradient, while an optimizer steps."""


@cache
def _derive(kind: type) -> Any:
    """Return the class of what is away, derived from the class that it has here."""
    if issubclass(kind, RemoteTensor):
        return kind
    if kind in (nn.Parameter, Tensor):
        return RemoteParameter if kind is nn.Parameter else RemoteTensor
    base = RemoteParameter if issubclass(kind, nn.Parameter) else RemoteTensor
    return type(f"Remote{kind.__name__}", (base, kind), {"own_class": kind})


def _get_own_class(weight: Tensor) -> Any:
    """Return the class that a weight has where its values are."""
    if not isinstance(weight, RemoteTensor):
        return type(weight)
    return getattr(weight, "own_class", nn.Parameter if isinstance(weight, nn.Parameter) else Tensor)


def send_away(weight: Tensor, owner: Owner, device: torch.device | None = None) -> None:
    """Let go of the values of a weight, which another rank has; the weight stays the same object.

    device: that of this rank, which weights of all ranks say that they are on; by default where the weight is.
    A weight that is away already is told where it is now.
    """
    exchange(
        weight, make_remote(_derive(type(weight)), weight, owner, requires_grad=weight.requires_grad, device=device)
    )


def bring_back(weight: Tensor, value: Tensor) -> None:
    """Give a weight that is away the values, and the memory, of `value`; the weight stays the same object."""
    exchange(weight, _make_own(weight, value))
    weight.__dict__.pop("owner", None)


def borrow(weight: RemoteTensor) -> Tensor:
    """Return a weight as it is on its own rank, in the memory of the values that are lent.

    Raises ElsewhereError for a weight without them.
    """
    if weight.lent is None:
        weight.owner.refuse("to run the model")
    made = _make_own(weight, weight.lent)
    made.__dict__.update({name: value for name, value in weight.__dict__.items() if name not in OF_REMOTE})
    return made


def call_with_lent(function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    """Call a function; if it is a module, with the values that are lent of its buffers, where these are away."""
    buffers = function.named_buffers() if isinstance(function, nn.Module) else ()
    lent = {name: borrow(buffer) for name, buffer in buffers if isinstance(buffer, RemoteTensor)}
    if not lent or not isinstance(function, nn.Module):
        return function(*tensors)
    return torch.func.functional_call(function, lent, tuple(tensors))


@cache
def refuse_scripts() -> None:
    """Let TorchScript refuse modules with weights that are away, for as long as the process lives.

    Its code in C++ asks no tensor for its class, and would save memory that is not there.
    """
    create: Callable[..., Any] = _recursive.create_script_module_impl

    @wraps(create)
    def create_with_values(nn_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        held = (*nn_module._parameters.values(), *nn_module._buffers.values())
        away = next((tensor for tensor in held if isinstance(tensor, RemoteTensor)), None)
        if away is not None:
            away.owner.refuse("TorchScript", "script a model as it was built, after it has loaded pipe.state_dict()")
        return create(nn_module, *args, **kwargs)

    _recursive.create_script_module_impl = create_with_values


def _make_own(weight: Tensor, value: Tensor) -> Tensor:
    """Return a tensor in the memory of `value`, of the class that a weight has on its own rank."""
    kind = _get_own_class(weight)
    made = value.detach()
    if not issubclass(kind, nn.Parameter):
        return made
    # A class derived from Parameter may have a constructor of its own, which this does not call.
    own: Tensor = torch.Tensor._make_subclass(kind, made, weight.requires_grad)
    return own
