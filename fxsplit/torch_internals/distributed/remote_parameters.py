"""Remote parameters: parameters and buffers of the model that are on other ranks.

A weight that becomes remote stays the same Python object, to which the model and optimizers refer. Its C++ tensor is
replaced by a tensor without memory, and its class by one derived from its own class and `RemoteTensor`. Bringing the
weight back undoes both.
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
"""Attributes that only remote weights have."""


class RemoteParameter(RemoteTensor, nn.Parameter):
    """A parameter on another rank."""

    aside: Tensor | None = None
    """The parameter's gradient while an optimizer steps: it is hidden from the optimizer here."""


@cache
def _derive(kind: type) -> Any:
    """Return the remote class for a class of tensors, derived from it and from RemoteTensor."""
    if issubclass(kind, RemoteTensor):
        return kind
    if kind in (nn.Parameter, Tensor):
        return RemoteParameter if kind is nn.Parameter else RemoteTensor
    base = RemoteParameter if issubclass(kind, nn.Parameter) else RemoteTensor
    return type(f"Remote{kind.__name__}", (base, kind), {"own_class": kind})


def _get_own_class(weight: Tensor) -> Any:
    """Return the class that a weight has on its own rank."""
    if not isinstance(weight, RemoteTensor):
        return type(weight)
    return getattr(weight, "own_class", nn.Parameter if isinstance(weight, nn.Parameter) else Tensor)


def send_away(weight: Tensor, owner: Owner, device: torch.device | None = None) -> None:
    """Free the values of a weight that another rank owns, and make it a remote tensor.

    The weight stays the same object.
    device: the device that the weight reports afterwards (default: its present device). If the weight is remote
        already, only its owner is updated.
    """
    exchange(
        weight, make_remote(_derive(type(weight)), weight, owner, requires_grad=weight.requires_grad, device=device)
    )


def bring_back(weight: Tensor, value: Tensor) -> None:
    """Make a remote weight local again, sharing memory with `value`. The weight stays the same object."""
    exchange(weight, _make_own(weight, value))
    weight.__dict__.pop("owner", None)


def borrow(weight: RemoteTensor) -> Tensor:
    """Return an ordinary tensor in place of a remote weight. It shares memory with the values that were lent.

    Raises ElsewhereError if no values were lent.
    """
    if weight.lent is None:
        weight.owner.refuse("to run the model")
    made = _make_own(weight, weight.lent)
    made.__dict__.update({name: value for name, value in weight.__dict__.items() if name not in OF_REMOTE})
    return made


def call_with_lent(function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    """Call a function. If it is a module with remote buffers, use their lent values."""
    buffers = function.named_buffers() if isinstance(function, nn.Module) else ()
    lent = {name: borrow(buffer) for name, buffer in buffers if isinstance(buffer, RemoteTensor)}
    if not lent or not isinstance(function, nn.Module):
        return function(*tensors)
    return torch.func.functional_call(function, lent, tuple(tensors))


@cache
def refuse_scripts() -> None:
    """Make TorchScript refuse modules with remote weights, from now until the process ends.

    TorchScript's C++ code does not look at a tensor's class, and would save memory that does not exist.
    """
    create: Callable[..., Any] = _recursive.create_script_module_impl

    @wraps(create)
    def create_with_values(nn_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        held = (*nn_module._parameters.values(), *nn_module._buffers.values())
        remote = next((tensor for tensor in held if isinstance(tensor, RemoteTensor)), None)
        if remote is not None:
            remote.owner.refuse("TorchScript", "script a model as it was built, after it has loaded pipe.state_dict()")
        return create(nn_module, *args, **kwargs)

    _recursive.create_script_module_impl = create_with_values


def _make_own(weight: Tensor, value: Tensor) -> Tensor:
    """Return a tensor that shares memory with `value`, with the class that a weight has on its own rank."""
    kind = _get_own_class(weight)
    made = value.detach()
    if not issubclass(kind, nn.Parameter):
        return made
    # A subclass of Parameter may have its own constructor, which _make_subclass does not call.
    own: Tensor = torch.Tensor._make_subclass(kind, made, weight.requires_grad)
    return own
