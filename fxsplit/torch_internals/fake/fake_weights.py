"""Capture and plan models that are too large for memory, with *fake tensors* instead of weights.

A fake tensor has a shape, a dtype and a device, but no memory; operators on it only compute shapes. A user builds the
model inside `without_weights()`. Capture and profiling run it inside `make_runnable(...)`. Afterwards the weights are
loaded stage by stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import count
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from fxsplit.errors import InputError
from fxsplit.torch_internals.distributed.remote_parameters import borrow
from fxsplit.torch_internals.distributed.remote_tensors import RemoteTensor, is_remote
from fxsplit.torch_internals.fake.made_up import MadeUp, make_up
from fxsplit.torch_internals.fake.real_shapes import RealShapes
from fxsplit.torch_internals.random.generators import keep_torch_generators
from fxsplit.torch_internals.scopes.log import hide_logged_warnings
from fxsplit.torch_internals.scopes.patch import Method, patch_method
from fxsplit.torch_internals.scopes.undo import restore_after
from fxsplit.torch_internals.tensors.layouts import list_parts
from fxsplit.torch_internals.thread_modes import enter_dispatch_mode

M = TypeVar("M", bound=nn.Module)
P = TypeVar("P", bound=Tensor)

READ = torch.ops.aten._local_scalar_dense.default
"""The operator that `item()` and `tolist()` call."""
NO_BACKWARD = -1
"""torch's id of the running backward if there is none."""


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is fake, as all tensors are inside `make_runnable(..., from_shapes=True)`."""
    return isinstance(tensor, FakeTensor)


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values in this process, so that it keeps what is written to it."""
    return not (is_fake(tensor) or tensor.is_meta or is_remote(tensor) or isinstance(tensor, MadeUp))


def lacks_values(model: nn.Module) -> bool:
    """Return whether any weight is on the meta device, or on another rank that has not lent its values.

    Weights are parameters and buffers.
    """
    weights = (*model.parameters(), *model.buffers())
    return any(w.is_meta or (isinstance(w, RemoteTensor) and w.lent is None) for w in weights)


@contextmanager
def without_weights() -> Iterator[None]:
    """Build a model without memory for its parameters: inside the block they are made on the meta device.

    Buffers keep their values. A file of weights may not contain them, and `torch.device("meta")` would lose them. Each
    parameter is allocated and freed before the next one, and initialisers have no values to compute.
    """
    # Keyed weakly by identity: a parameter that is freed frees its memory, and a new parameter may get its id.
    made = WeakIdKeyDictionary()

    def without_memory(register: Method) -> Method:
        def registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None and not param.is_meta and not is_lazy(param):
                # A parameter registered under two names stays one parameter.
                if param not in made:
                    made[param] = fill_like(param, param.detach().to("meta"))
                param = made[param]
            register(module, name, param)

        return registered

    with patch_method(nn.Module, "register_parameter", without_memory):
        yield


@contextmanager
def make_runnable(
    module: M, tensors: Sequence[Tensor], from_shapes: bool, device: torch.device | None = None
) -> Iterator[tuple[M, list[Tensor]]]:
    """Yield the module and inputs for it that can run on one device.

    With `from_shapes`, all parameters, buffers and inputs are fake tensors during the block, on `device` (which need
    not exist), by default the first input's device.

    Otherwise weights and inputs are copied to host memory for the block if the weights are on several devices, as after
    stages have been placed, or if no input is on their device. Weights of other ranks are replaced by the values that
    these ranks have lent. In all other cases the module and the inputs are yielded unchanged. Raises ElsewhereError for
    a weight of another rank that has not been lent.
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
    """Yield the module and inputs for it that run in host memory on made-up weights (see `made_up`).

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


def fill_like(weight: P, value: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> P:
    """Return a tensor with the values of `value`, and the class, attributes, strides and requires_grad of `weight`.

    Device and dtype default to those of `value`.
    """
    device, dtype = device or value.device, dtype or value.dtype
    return dress_like(
        weight, torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device=device).copy_(value)
    )


def dress_like(weight: P, value: Tensor) -> P:
    """Return a tensor that shares memory with `value`, with class, attributes and requires_grad of `weight`."""
    made = value
    if isinstance(weight, nn.Parameter):
        # A subclass of Parameter may have its own constructor, which _make_subclass does not call.
        made = torch.Tensor._make_subclass(type(weight), made, weight.requires_grad)
    made.requires_grad_(weight.requires_grad)
    made.__dict__.update(weight.__dict__)
    return cast(P, made)


class Snapshot:
    """A copy of tensors' values, to detect later writes. For fake tensors, their version counters."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._kept = [(t, *((0, t.detach().clone()) if has_values(t) else (t._version, None))) for t in tensors]

    def changed(self) -> list[Tensor]:
        """Return the tensors that have been written to since."""
        return [t for t, version, value in self._kept if _differs(t, version, value)]

    def restore(self) -> None:
        """Restore the values of tensors that have changed. Fake tensors have no values."""
        with torch.no_grad():
            for tensor, version, value in self._kept:
                # Skip unchanged tensors: any write counts as a new version, and autograd may have saved the tensor.
                if value is None or not _differs(tensor, version, value):
                    continue
                # A tensor that was resized may have lost its memory.
                if tensor.shape != value.shape:
                    tensor.data = value.clone()
                tensor.copy_(value)


@contextmanager
def keep_values(tensors: Iterable[Tensor]) -> Iterator[Snapshot]:
    """Restore the values of tensors after the block, at whichever line an interrupt comes. Yields the snapshot."""
    snapshot = Snapshot(tensors)
    with restore_after(snapshot.restore):
        yield snapshot


def _differs(tensor: Tensor, version: int, value: Tensor | None) -> bool:
    """Return whether a tensor was written to since it had this version and this value (None for a fake tensor)."""
    if value is None:
        return tensor._version != version
    if tensor.shape != value.shape:
        return True
    pairs = zip(list_parts(tensor), list_parts(value), strict=True)
    return any(a.shape != b.shape or _has_other_values(a, b) for a, b in pairs)


def _has_other_values(tensor: Tensor, value: Tensor) -> bool:
    """Return whether two tensors of the same shape differ; NaN equals NaN."""
    # Compare values instead of versions, since some kernels (batch norm's) write without counting a version.
    return not torch.equal(tensor, value) and not bool(((tensor == value) | (tensor.isnan() & value.isnan())).all())


class _WatchedFakeMode(FakeTensorMode):
    """A fake tensor mode that reproduces the side effects of real operators for which observers look.

    An operator that draws advances the random generator. An operator that updates running statistics increments their
    version counters.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        self._real_shapes = RealShapes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        is_operator = isinstance(func, torch._ops.OpOverload)
        # Some backwards written in Python read values, such as the number of rows per expert. Return 0: the shape of a
        # gradient does not depend on them. In a forward, values may decide what is computed, so reading them is
        # refused.
        if func is READ and is_fake(args[0]) and torch._C._current_graph_task_id() != NO_BACKWARD:
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (RuntimeError, TypeError, ValueError) as refused:
            if not is_operator:
                raise
            result = self._real_shapes.find(self, func, args, kwargs or {}, refused)
        if not is_operator or not _leaves_traces(func):
            return result
        given: dict[str, Any] = {a.name: a.default_value for a in func._schema.arguments}
        given |= {**dict(zip(given, args, strict=False)), **(kwargs or {})}
        # Attention is tagged as an operator that draws, but draws only with dropout.
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p", 1.0) > 0:
            with unset_fake_temporarily():
                torch.rand((), device="cpu")
        if "running_mean" in given and (given.get("training") or given.get("train")):
            torch.autograd.graph.increment_version(
                [given[n] for n in ("running_mean", "running_var") if isinstance(given.get(n), Tensor)]
            )
        return result


@cache  # called for every operator that runs, but there are few different operators
def _leaves_traces(func: torch._ops.OpOverload) -> bool:
    """Return whether an operator may draw random numbers or update running statistics."""
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return draws or any(argument.name == "running_mean" for argument in func._schema.arguments)


@contextmanager
def _replace_by_fakes(module: nn.Module, device: torch.device) -> Iterator[Any]:
    """Replace all parameters and buffers of a module by fake tensors on `device` for the block.

    Yields a function that returns the fake tensor of a tensor, always the same one.
    """
    mode = _WatchedFakeMode()
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
    """Replace all parameters and buffers by the results of `make` for the block."""
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
