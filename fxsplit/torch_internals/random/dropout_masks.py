"""Dropout as multiplication by a mask, so that torch.compile need not interrupt its graph at dropout.

The mask is dropout applied to ones, by the same function from the same generator state. Multiplying by it therefore
gives the same result as dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxsplit.torch_internals.random.seeded_calls import SeededCall

MASKS: tuple[tuple[Any, str], ...] = (
    (F.dropout, "dropout"),
    (F.dropout1d, "dropout1d"),
    (F.dropout2d, "dropout2d"),
    (F.dropout3d, "dropout3d"),
    (torch.dropout, "dropout"),
    (torch.ops.aten.dropout.default, "dropout"),
    (nn.Dropout, "dropout"),
    (nn.Dropout1d, "dropout1d"),
    (nn.Dropout2d, "dropout2d"),
    (nn.Dropout3d, "dropout3d"),
)
"""The dropout functions and module classes, each with the name of its function in torch.nn.functional."""


def find_mask(call: Any) -> str | None:
    """Return the name of the dropout function that a function or module calls, if a product with a mask can replace it.

    Returns None for any other function or module, and for a module with hooks.
    """
    if isinstance(call, nn.Module) and (call._forward_hooks or call._forward_pre_hooks or call._backward_hooks):
        return None
    return next((name for known, name in MASKS if call is known or type(call) is known), None)


@torch.library.custom_op("fxsplit::dropout_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def dropout_mask(like: Tensor, p: float, name: str, key: str) -> Tensor:
    """Return the mask with which a dropout function would multiply a tensor.

    like: the tensor. p: the dropout rate. name: the function in torch.nn.functional.
    key: the name of the graph's node, from which the random numbers follow.
    """
    draw = SeededCall(key, getattr(F, name))
    result: Tensor = draw(torch.ones_like(like), p, True)
    return result


@dropout_mask.register_fake
def _(like: Tensor, p: float, name: str, key: str) -> Tensor:
    return torch.empty_like(like)


def multiply_by_mask(draw: SeededCall, *args: Any, **kwargs: Any) -> Tensor:
    """Apply dropout to a tensor: draw the mask in one operator, and multiply the tensor by the mask.

    draw: the dropout call, of a kind for which `find_mask` returns a name. args, kwargs: the arguments of the call.
    """
    call = draw.call
    if isinstance(call, nn.Module):
        module: Any = call
        return _drop(call, draw.key, args[0] if args else kwargs["input"], module.p, module.training, module.inplace)
    return _drop(call, draw.key, *args, **kwargs)


def _drop(
    call: Any, key: str, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> Tensor:
    """Return a tensor times its dropout mask. `key`: the name of the graph's node.

    From `p` on, as in torch's dropout.
    """
    if not (training and train) or p == 0.0:
        return input
    mask = torch.ops.fxsplit.dropout_mask(input.detach(), p, find_mask(call), key)
    return input.mul_(mask) if inplace else input * mask
