"""Weigh the loss: measure the memory that it keeps for its backward, and the peaks of its forward and backward.

At compile time there is no target, and calling a user's function on made-up targets might have any effect. So only
torch's own losses are weighed, on outputs and targets of the right shapes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, UntypedStorage, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from fxsplit.ir.facts.costs.compress import parse_tensor
from fxsplit.ir.facts.costs.loss import LossCost
from fxsplit.torch_internals.tensors.allocations import count_allocations

MOST_BYTES = 1 << 28
"""The most bytes of outputs to weigh a loss with. Of larger outputs, some rows are weighed and the result is scaled."""


def weigh_loss(function: Callable[..., Any], gm: fx.GraphModule, made: str) -> LossCost | None:
    """Return the memory of a loss for the graph's output, in bytes; None if unknown.

    `made` describes the output as text, such as `float32[8, 10]`. The memory is unknown for losses that are not torch's
    own, and for several outputs. This function has no side effects.
    """
    name, shape = parse_tensor(made) or ("", [])
    is_float = name.startswith(("float", "bfloat16"))
    output = gm.graph.output_node().args[0]
    if not shape or not is_float or not isinstance(output, fx.Node) or not is_of_torch(function):
        return None
    dtype = getattr(torch, name)
    size = prod(shape) * dtype.itemsize
    rows = max(1, min(shape[0], shape[0] * MOST_BYTES // max(size, 1)))
    if not size or size // shape[0] * rows > MOST_BYTES:
        return None
    times = shape[0] / rows
    outputs = (rows, *shape[1:])
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tried = [_try_target(function, torch.rand(outputs, dtype=dtype), target) for target in _list_targets(outputs)]
    weighed = [one for one in tried if one is not None]
    if not weighed:
        return None
    # A cross entropy takes classes or probabilities, and the user's targets may be of the more expensive kind.
    return LossCost(
        times * max(one.kept_bytes for one in weighed),
        times * max(one.forward_peak_bytes for one in weighed),
        times * max(one.backward_peak_bytes for one in weighed),
        any(one.keeps_outputs for one in weighed),
    )


def is_of_torch(function: Callable[..., Any]) -> bool:
    """Return whether a loss is torch's own function, or torch's own module without hooks.

    It may have bound arguments.
    """
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, nn.Module):
        hooked = function._forward_hooks or function._forward_pre_hooks or function._backward_hooks
        return type(function).__module__.startswith("torch.nn.") and not hooked
    return str(getattr(function, "__module__", None)).startswith("torch.nn.")


def _list_targets(shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield made-up targets for outputs of a shape: numbers of the same shape, and class indices."""
    yield torch.rand(shape)
    if len(shape) > 1:
        yield torch.zeros(shape[:1] + shape[2:], dtype=torch.int64)


def _try_target(function: Callable[..., Any], outputs: Tensor, target: Tensor) -> LossCost | None:
    """Return the memory of a loss for outputs and a target; None if the loss rejects such a target."""
    outputs, saved = outputs.requires_grad_(), dict[int, UntypedStorage]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return tensor

    try:
        with torch.enable_grad(), saved_tensors_hooks(keep, lambda kept: kept), count_allocations() as forward:
            loss = function(outputs, target)
        # The result's own memory is kept too: mse_loss returns a number in a buffer for all elements.
        keep(loss)
        # Kept memory counts separately, so keep it allocated here.
        with count_allocations() as backward:
            torch.autograd.grad(loss, outputs, retain_graph=True)
    except Exception:  # a loss may raise anything for an unsuitable target
        return None
    if forward.peak_bytes is None or backward.peak_bytes is None or loss.ndim:
        return None
    keeps_outputs = saved.pop(outputs.untyped_storage()._cdata, None) is not None
    saved.pop(target.untyped_storage()._cdata, None)
    kept = sum(storage.nbytes() for storage in saved.values())
    return LossCost(float(kept), float(forward.peak_bytes), float(backward.peak_bytes), keeps_outputs)
