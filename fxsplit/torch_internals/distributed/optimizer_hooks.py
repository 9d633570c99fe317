"""Hide remote gradients, which have their values on other ranks, while an optimizer steps.

Optimizers skip parameters without a gradient, and so skip remote parameters. A closure that an optimizer calls runs a
backward and may clip, so it sees all gradients. Norms that an optimizer computes itself are over this rank's gradients.

    step()  ->  hide remote gradients, make this rank's gradients plain tensors
                    closure()  ->  show all again, run the closure, hide again
                update this rank's parameters
            ->  show all again
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
    """Hide remote gradients whenever an optimizer steps, from now until the process ends.

    own: the class of this rank's gradients, with which norms cover all ranks. During a step they are plain tensors.
    """
    register_optimizer_step_pre_hook(partial(_put_aside, own))
    register_optimizer_step_post_hook(partial(_put_back, own))


def _mark(optimizer: Optimizer, before: type[Tensor], now: type[Tensor]) -> None:
    """Change the class of this rank's gradients from `before` to `now`, if other ranks know of these gradients."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if type(weight.grad) is before and hasattr(weight.grad, "place"):
                weight.grad.__class__ = now


def _list_remote(optimizer: Optimizer) -> list[RemoteParameter]:
    """Return an optimizer's parameters that are on other ranks."""
    return [
        weight for group in optimizer.param_groups for weight in group["params"] if isinstance(weight, RemoteParameter)
    ]


def _put_aside(own: type[Tensor], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hide remote gradients from an optimizer that is about to step.

    Returns the arguments of step() with a closure that shows the gradients again, or None if there is no closure.
    """
    _mark(optimizer, own, Tensor)
    remote = _list_remote(optimizer)
    if remote and isinstance(optimizer, LBFGS):
        raise InputError(
            f"LBFGS makes one vector of all parameters, and {remote[0].owner} is on rank {remote[0].owner.rank}: use "
            "an optimizer that steps each parameter by itself, such as AdamW or SGD"
        )
    for weight in remote:
        weight.aside, weight.grad = weight.grad, None
        # Free state that was made while the weight was on this rank.
        if (state := optimizer.state.get(weight)) and not _is_light(state):
            _let_go(state, weight)

    def call_with_gradients(closure: Callable[[], Any]) -> Any:
        # The closure runs forward and backward, and may clip.
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
    """Restore the gradients that were hidden."""
    for weight in _list_remote(optimizer):
        weight.grad, weight.aside = weight.aside, None
    _mark(optimizer, Tensor, own)


def _is_light(state: dict[Any, Any]) -> bool:
    """Return whether the optimizer state of a weight takes hardly any memory."""
    return not any(isinstance(value, Tensor) and value.ndim and not is_remote(value) for value in state.values())


def _let_go(state: dict[Any, Any], weight: RemoteParameter) -> None:
    """Replace the tensors of a weight's optimizer state by remote tensors, which frees their memory."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.ndim and not is_remote(value):
            state[key] = make_remote(RemoteTensor, value, weight.owner)
