"""Gradients that are away are put aside while an optimizer steps.

Optimizers pass by parameters without a gradient, and so by those of other ranks. A closure that an optimizer calls runs
a backward and may clip: it sees all gradients. Norms that an optimizer asks for itself are of gradients of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fxsplit.errors import InputError
from fxsplit.torch_internals.distributed.remote_parameters import RemoteParameter
from fxsplit.torch_internals.distributed.remote_tensors import RemoteTensor, is_remote, make_remote


@cache
def hide_gradients_from_optimizers(own: type[Tensor]) -> None:
    """Put gradients that are away aside whenever an optimizer steps, for as long as the process lives.

    own: the class of gradients of this rank, by which ranks meet for norms; while an optimizer steps they are plain.
    """
    register_optimizer_step_pre_hook(partial(_put_aside, own))
    register_optimizer_step_post_hook(partial(_put_back, own))


def _mark(optimizer: Optimizer, before: type[Tensor], now: type[Tensor]) -> None:
    """Let gradients of this rank that are of one class, and known to all ranks, be of another."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if type(weight.grad) is before and hasattr(weight.grad, "place"):
                weight.grad.__class__ = now


def _list_remote(optimizer: Optimizer) -> list[RemoteParameter]:
    """Return the parameters of an optimizer that other ranks have."""
    return [
        weight for group in optimizer.param_groups for weight in group["params"] if isinstance(weight, RemoteParameter)
    ]


def _put_aside(own: type[Tensor], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hide gradients that are away from an optimizer that is about to step; return its arguments."""
    _mark(optimizer, own, Tensor)
    away = _list_remote(optimizer)
    if away and isinstance(optimizer, LBFGS):
        raise InputError(
            f"LBFGS makes one vector of all parameters, and {away[0].owner} is on rank {away[0].owner.rank}: use an "
            "optimizer that steps each parameter by itself, such as AdamW or SGD"
        )
    for weight in away:
        weight.aside, weight.grad = weight.grad, None
        # What an optimizer keeps that was made while the weight was here.
        if (state := optimizer.state.get(weight)) and not _is_light(state):
            _let_go(state, weight)

    def call_with_gradients(closure: Callable[[], Any]) -> Any:
        # A closure runs forward and backward, and may clip.
        _put_back(own, optimizer)
        loss = closure()
        _put_aside(own, optimizer, (), {})
        return loss

    if len(args) > 1 and callable(args[1]):
        return (args[0], partial(call_with_gradients, args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": partial(call_with_gradients, kwargs["closure"])}
    return None


def _put_back(own: type[Tensor], optimizer: Optimizer, *arguments: Any) -> None:
    """Show gradients again that were put aside."""
    for weight in _list_remote(optimizer):
        weight.grad, weight.aside = weight.aside, None
    _mark(optimizer, Tensor, own)


def _is_light(state: dict[Any, Any]) -> bool:
    """Return whether an optimizer's state of a weight has no memory to speak of."""
    return not any(isinstance(value, Tensor) and value.ndim and not is_remote(value) for value in state.values())


def _let_go(state: dict[Any, Any], weight: RemoteParameter) -> None:
    """Put tensors that are away in place of those that an optimizer keeps of a weight."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.ndim and not is_remote(value):
            state[key] = make_remote(RemoteTensor, value, weight.owner)
