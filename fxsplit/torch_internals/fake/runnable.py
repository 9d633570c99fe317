"""Run models whose weights are fake, on several devices or on other ranks.

A *fake tensor* has a shape, a dtype and a device, but no memory; operators on it only compute shapes. Capture and
profiling run a model inside `make_runnable(...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fxsplit.errors import InputError
from fxsplit.torch_internals.distributed.remote_parameters import borrow
from fxsplit.torch_internals.distributed.remote_tensors import RemoteTensor, is_remote
from fxsplit.torch_internals.fake.made_up import make_up
from fxsplit.torch_internals.fake.mode import WatchedFakeMode
from fxsplit.torch_internals.fake.values import has_values
from fxsplit.torch_internals.random.generators import keep_torch_generators
from fxsplit.torch_internals.scopes.log import hide_logged_warnings
from fxsplit.torch_internals.scopes.undo import restore_after
from fxsplit.torch_internals.tensors.dress import fill_like
from fxsplit.torch_internals.thread_modes import enter_dispatch_mode

M = TypeVar("M", bound=nn.Module)
P = TypeVar("P", bound=Tensor)


@contextmanager
def make_runnable(
    module: M, tensors: Sequence[Tensor], from_shapes: bool, device: torch.device | None = None
) -> Iterator[tuple[M, list[Tensor]]]:
    """Yield the module and inputs for it in a form that can run on one device.

    With `from_shapes`, all parameters, buffers and inputs are fake tensors inside the block. They are on `device`,
    which need not exist (default: the first input's device).
    Otherwise weights and inputs are copied to host memory for the block, if the weights are on several devices, as
    after stages have been placed, or if no input is on their device. Weights of other ranks are replaced by the values
    that these ranks have lent. In all other cases the module and the inputs are yielded unchanged.
    Raises ElsewhereError for a weight of another rank that has not been lent.
    """
    weights = (*module.parameters(), *module.buffers())
    if from_shapes:
        with _replace_by_fakes(module, device or tensors[0].device) as make_fake:
            yield module, [make_fake(t) for t in tensors]
    elif are_together(weights, tensors) and not any(map(is_remote, weights)):
        yield module, list(tensors)
    else:
        # Do not copy the modules: their attributes are the user's own objects, which forward() reads and writes.
        is_here = all(map(_is_in_host_memory, weights))
        with nullcontext() if is_here else _replace_weights(module, _copy_to_host):
            yield module, [t.detach().cpu().requires_grad_(t.requires_grad) for t in tensors]


@contextmanager
def make_up_weights(module: M, tensors: Sequence[Tensor]) -> Iterator[tuple[M, list[Tensor]]]:
    """Yield the module and inputs for it in a form that runs in host memory, on made-up weights (see `made_up`).

    Buffers with values here, or with values lent by another rank, are copied. Raises InputError for an input without
    values.
    """
    if not all(map(has_values, tensors)):
        raise InputError("inputs on the meta device have no values: give an example with values")
    number = count()

    def make(weight: Tensor) -> Tensor:
        if not isinstance(weight, nn.Parameter):
            if isinstance(weight, RemoteTensor) and weight.lent is not None:
                return borrow(weight).clone()
            if has_values(weight):
                return weight.detach().cpu().clone()
        return make_up(weight, next(number))

    with _replace_weights(module, make):
        yield module, [t.detach().cpu().requires_grad_(t.requires_grad) for t in tensors]


def are_together(weights: Iterable[Tensor], tensors: Iterable[Tensor]) -> bool:
    """Return whether a model can run as it is: all weights on one device, together with at least one input."""
    devices = {w.device for w in weights}
    # Some models expect their lengths in host memory, and all other inputs on the device of the weights.
    return len(devices) <= 1 and (not devices or not devices.isdisjoint(t.device for t in tensors))


def _is_in_host_memory(weight: Tensor) -> bool:
    """Return whether a weight's values are in the host memory of this process."""
    return weight.device.type == "cpu" and not is_remote(weight)


def _copy_to_host(weight: P) -> P:
    """Return a weight with its values in host memory: the weight itself, a copy, or values lent by another rank."""
    if isinstance(weight, RemoteTensor):
        return cast(P, borrow(weight))
    return weight if _is_in_host_memory(weight) else fill_like(weight, weight.detach().cpu())


@contextmanager
def _replace_by_fakes(module: nn.Module, device: torch.device) -> Iterator[Any]:
    """Inside the block, replace all parameters and buffers of a module by fake tensors on `device`.

    Yields a function that returns the fake tensor for a tensor. It returns the same fake tensor each time.
    """
    mode = WatchedFakeMode()
    made: dict[Tensor, Tensor] = {}

    def make_fake(tensor: Tensor) -> Tensor:
        if tensor not in made:
            with mode, torch.no_grad():
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            fake = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
            made[tensor] = fake.requires_grad_(tensor.requires_grad)
        return made[tensor]

    with (
        _replace_weights(module, make_fake),
        keep_torch_generators(),
        # torch logs every fake kernel that refuses, with the whole stack. An error reports it if it matters.
        hide_logged_warnings("torch"),
        enter_dispatch_mode(mode),
    ):
        yield make_fake


@contextmanager
def _replace_weights(module: nn.Module, make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside the block, replace all parameters and buffers of a module by the results of `make`."""
    made: dict[Tensor, Tensor] = {}
    registries: list[dict[str, Any]] = [d for part in module.modules() for d in (part._parameters, part._buffers)]
    before = [(held, dict(held)) for held in registries]

    def put_back() -> None:
        for held, own in before:
            held.clear()
            held.update(own)

    with restore_after(put_back):
        # Change the registries directly, since setting an attribute may run the module's own code.
        for held, own in before:
            for name, weight in own.items():
                if weight is not None:
                    # A weight registered under two names stays one weight.
                    held[name] = made[weight] if weight in made else made.setdefault(weight, make(weight))
        yield
