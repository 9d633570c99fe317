"""Capture and plan models that are too big to be in memory at once, with *fake tensors* in place of their weights.

A fake tensor has a shape, a dtype and a device, and no memory; operators on it compute shapes only. A user builds such
a model inside `without_weights()`. Capture and profiling run it inside `make_runnable(...)`, and values are loaded
stage by stage afterwards.
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
"""The operator behind `item()` and `tolist()`."""
NO_BACKWARD = -1
"""What torch gives for the number of the backward that is running, where none is."""


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is a fake one, as all are that run inside of `make_runnable(..., from_shapes=True)`."""
    return isinstance(tensor, FakeTensor)


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has more than a shape, and keeps what is written to it."""
    return not (is_fake(tensor) or tensor.is_meta or is_remote(tensor) or isinstance(tensor, MadeUp))


def lacks_values(model: nn.Module) -> bool:
    """Return whether any parameter or buffer of the model is on the meta device, or on another rank that lends none."""
    weights = (*model.parameters(), *model.buffers())
    return any(w.is_meta or (isinstance(w, RemoteTensor) and w.lent is None) for w in weights)


@contextmanager
def without_weights() -> Iterator[None]:
    """Build a model without memory for its parameters: inside the block they are made on the meta device.

    Buffers keep their values: a file of weights need not have them, and `torch.device("meta")` would lose them.
    Each parameter is allocated and given back before the next one, and initialisers find no values to compute.
    """
    # By identity and weakly: a parameter that is gone gives its memory back, and its id to a new one.
    made = WeakIdKeyDictionary()

    def without_memory(register: Method) -> Method:
        def registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None and not param.is_meta and not is_lazy(param):
                # One parameter that is registered under two names stays one.
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
    """Yield the module and inputs for it, such that they can run on one device.

    With `from_shapes` all parameters, buffers and inputs are replaced by fake tensors for as long as the block takes:
    on `device`, which need not exist, by default on that of the first input.
    Where weights are on several devices, as once stages have been placed, or no input is where they are, as once all
    stages have been placed on one GPU, they are replaced by copies in host memory for as long. So are weights of other
    ranks, by the values that are lent. In all other cases module and inputs are yielded as they are.

    Raises ElsewhereError for a weight of another rank whose values are not lent.
    """
    weights = (*module.parameters(), *module.buffers())
    if from_shapes:
        with _replace_by_fakes(module, device or tensors[0].device) as make_fake:
            yield module, [make_fake(t) for t in tensors]
    elif are_together(weights, tensors) and not any(map(is_remote, weights)):
        yield module, list(tensors)
    else:
        # Not a copy of the modules: their Python attributes are the user's objects, which forward() reads and writes.
        is_here = all(map(_is_in_host_memory, weights))
        with nullcontext() if is_here else _replace_weights(module, _copy_to_host):
            yield module, [t.detach().cpu().requires_grad_(t.requires_grad) for t in tensors]


@contextmanager
def make_up_weights(module: M, tensors: Sequence[Tensor]) -> Iterator[tuple[M, list[Tensor]]]:
    """Yield the module and inputs for it, such that they run in host memory on made-up weights (see `made_up`).

    Buffers are copies of those that have values, or that another rank has lent. Raises InputError for an input without
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
    """Return whether a model can run: its weights are on one device, and so is one of its inputs, or several."""
    devices = {w.device for w in weights}
    # Some models want their lengths in host memory, and all else with the weights.
    return len(devices) <= 1 and (not devices or not devices.isdisjoint(t.device for t in tensors))


def _is_in_host_memory(weight: Tensor) -> bool:
    """Return whether the values of a weight are in the host memory of this process."""
    return weight.device.type == "cpu" and not is_remote(weight)


def _copy_to_host(weight: P) -> P:
    """Return a weight with its values in host memory: itself, a copy, or what another rank has lent."""
    if isinstance(weight, RemoteTensor):
        return cast(P, borrow(weight))
    return weight if _is_in_host_memory(weight) else fill_like(weight, weight.detach().cpu())


def fill_like(weight: P, value: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> P:
    """Return a tensor with the values of `value`, and with class, attributes, strides and requires_grad of `weight`.

    It is on the device of `value` and in its dtype, where no others are given.
    """
    device, dtype = device or value.device, dtype or value.dtype
    return dress_like(
        weight, torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device=device).copy_(value)
    )


def dress_like(weight: P, value: Tensor) -> P:
    """Return a tensor in the memory of `value`, with class, attributes and requires_grad of `weight`."""
    made = value
    if isinstance(weight, nn.Parameter):
        # A class derived from Parameter may have a constructor of its own, which this does not call.
        made = torch.Tensor._make_subclass(type(weight), made, weight.requires_grad)
    made.requires_grad_(weight.requires_grad)
    made.__dict__.update(weight.__dict__)
    return cast(P, made)


class Snapshot:
    """The values of tensors, to tell later which were written to. For fake tensors, the counts of their writes."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._kept = [(t, *((0, t.detach().clone()) if has_values(t) else (t._version, None))) for t in tensors]

    def changed(self) -> list[Tensor]:
        """Return the tensors that have been written to since."""
        return [t for t, version, value in self._kept if _differs(t, version, value)]

    def restore(self) -> None:
        """Write the values back, where they have changed. Fake tensors have none to restore."""
        with torch.no_grad():
            for tensor, version, value in self._kept:
                # A write counts as a new version even where it changes nothing, and autograd may have saved the tensor.
                if value is None or not _differs(tensor, version, value):
                    continue
                # A tensor that was resized may have lost the memory of its values.
                if tensor.shape != value.shape:
                    tensor.data = value.clone()
                tensor.copy_(value)


@contextmanager
def keep_values(tensors: Iterable[Tensor]) -> Iterator[Snapshot]:
    """Restore the values of tensors after the block, whichever line an interrupt comes at; yields what they are now."""
    snapshot = Snapshot(tensors)
    with restore_after(snapshot.restore):
        yield snapshot


def _differs(tensor: Tensor, version: int, value: Tensor | None) -> bool:
    """Return whether a tensor has been written to since it had this version and this value (None for a fake one)."""
    if value is None:
        return tensor._version != version
    if tensor.shape != value.shape:
        return True
    pairs = zip(list_parts(tensor), list_parts(value), strict=True)
    return any(a.shape != b.shape or _has_other_values(a, b) for a, b in pairs)


def _has_other_values(tensor: Tensor, value: Tensor) -> bool:
    """Return whether two tensors of one shape differ; NaN is equal to NaN."""
    # Values are compared and not versions, since some kernels (batch norm's) write and count no version. The second
    # comparison takes NaN for equal to NaN.
    return not torch.equal(tensor, value) and not bool(((tensor == value) | (tensor.isnan() & value.isnan())).all())


class _WatchedFakeMode(FakeTensorMode):
    """Computes shapes, with the traces that a real operator leaves and that observers look for.

    An operator that draws takes a number from the generator, so its state changes. An operator that updates running
    statistics raises their version counters.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        self._real_shapes = RealShapes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        is_operator = isinstance(func, torch._ops.OpOverload)
        # Some backwards are Python that reads values, such as how many rows each expert has. Whatever these are, a
        # gradient has the shape of what it is of. In a forward a value may decide what is computed: that is refused.
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
        # Attention has the tag of operators that draw, but draws only where it drops.
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p", 1.0) > 0:
            with unset_fake_temporarily():
                torch.rand((), device="cpu")
        if "running_mean" in given and (given.get("training") or given.get("train")):
            torch.autograd.graph.increment_version(
                [given[n] for n in ("running_mean", "running_var") if isinstance(given.get(n), Tensor)]
            )
        return result


@cache  # asked for every operator that runs, of which there are few kinds
def _leaves_traces(func: torch._ops.OpOverload) -> bool:
    """Return whether an operator may draw, or update running statistics."""
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return draws or any(argument.name == "running_mean" for argument in func._schema.arguments)


@contextmanager
def _replace_by_fakes(module: nn.Module, device: torch.device) -> Iterator[Any]:
    """Put fake tensors on `device` in place of all parameters and buffers of a module, for as long as the block takes.

    Yields a function that returns the fake tensor of another tensor, the same one each time.
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
        # torch logs each fake kernel that refuses, with its whole stack; what stops a model is told by an error.
        hide_logged_warnings("torch"),
        enter_dispatch_mode(mode),
    ):
        yield make_fake


@contextmanager
def _replace_weights(module: nn.Module, make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Put what `make` returns for them in place of all parameters and buffers, for as long as the block takes."""
    made: dict[Tensor, Tensor] = {}
    registries: list[dict[str, Any]] = [d for part in module.modules() for d in (part._parameters, part._buffers)]
    before = [(held, dict(held)) for held in registries]

    def put_back() -> None:
        for held, own in before:
            held.clear()
            held.update(own)

    with restore_after(put_back):
        # The registries are changed directly, since to set an attribute may run code of the module's own.
        for held, own in before:
            for name, weight in own.items():
                if weight is not None:
                    # A weight under two names stays one.
                    held[name] = made[weight] if weight in made else made.setdefault(weight, make(weight))
        yield
