"""Stand-ins: tensors that have a shape and no memory, to capture and plan what is too big to be anywhere at once."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy

from fxsplit.torch_internals.patch import Method, patch_method

M = TypeVar("M", bound=nn.Module)
P = TypeVar("P", bound=Tensor)


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor stands for another inside of `make_runnable`."""
    return isinstance(tensor, FakeTensor)


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has more than a shape."""
    return not (is_fake(tensor) or tensor.is_meta)


def lacks_values(model: nn.Module) -> bool:
    """Return whether any parameter or buffer of the model is on the meta device."""
    return any(w.is_meta for w in (*model.parameters(), *model.buffers()))


@contextmanager
def without_weights() -> Iterator[None]:
    """Build a model without memory for its parameters: inside the block they are on the meta device.

    Buffers are computed as ever, which `torch.device("meta")` would not do, and which a checkpoint need not have.
    Parameters are made one at a time, and what initialises them has nothing to do.
    """
    made: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def without_memory(register: Method) -> Method:
        def registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None and not param.is_meta and not is_lazy(param):
                of, empty = made.get(id(param), (lambda: None, param))
                if of() is not param:  # one that is registered twice stays one
                    empty = fill_like(param, param.detach().to("meta"))
                    made[id(param)] = weakref.ref(param), empty
                param = empty
            register(module, name, param)

        return registered

    with patch_method(nn.Module, "register_parameter", without_memory):
        yield


@contextmanager
def make_runnable(module: M, tensors: Sequence[Tensor], from_shapes: bool) -> Iterator[tuple[M, list[Tensor]]]:
    """Yield the module and inputs for it such that they can run as one.

    They are what they are; copies in host memory, where weights are on several devices, as once stages have been
    placed; or, `from_shapes`, the module with stand-ins in place of all it holds, for as long as the block takes.
    """
    devices = {w.device for w in (*module.parameters(), *module.buffers())}
    if from_shapes:
        with _replace_by_fakes(module, tensors[0].device) as imagine:
            yield module, [imagine(t) for t in tensors]
    elif len(devices) > 1:
        yield copy.deepcopy(module).to("cpu"), [t.detach().cpu().requires_grad_(t.requires_grad) for t in tensors]
    else:
        yield module, list(tensors)


def fill_like(weight: P, value: Tensor) -> P:
    """Return a weight of the same class, attributes and strides as another, with a value."""
    made = torch.empty_strided(weight.shape, weight.stride(), dtype=value.dtype, device=value.device).copy_(value)
    if isinstance(weight, nn.Parameter):
        made = torch.Tensor._make_subclass(type(weight), made, weight.requires_grad)
    made.requires_grad_(weight.requires_grad)
    made.__dict__.update(weight.__dict__)
    return cast(P, made)


class Snapshot:
    """What tensors hold, to tell later which were written to; of stand-ins it is how often they were."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._kept = [(t, *((0, t.detach().clone()) if has_values(t) else (t._version, None))) for t in tensors]

    def changed(self) -> list[Tensor]:
        """Return the tensors that are not as they were."""
        return [t for t, version, value in self._kept if _differs(t, version, value)]

    def restore(self) -> None:
        """Let all be as they were; nobody will ask what stand-ins were."""
        with torch.no_grad():
            for tensor, version, value in self._kept:
                if value is not None and _differs(tensor, version, value):
                    tensor.copy_(value)


def _differs(tensor: Tensor, version: int, value: Tensor | None) -> bool:
    """Return whether a tensor is not as it was; some kernels write, and count no version."""
    if value is None:
        return tensor._version != version
    return not torch.equal(tensor, value) and not bool(((tensor == value) | (tensor.isnan() & value.isnan())).all())


class _WatchedFakeMode(FakeTensorMode):
    """Computes shapes, and lets those who watch see all that a real operator would do to the world.

    One that draws takes a number from the generator, and one that updates running statistics counts as a write to them.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            return result
        given: dict[str, Any] = {a.name: a.default_value for a in func._schema.arguments}
        given |= {**dict(zip(given, args, strict=False)), **(kwargs or {})}
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p", 1.0) > 0:
            with unset_fake_temporarily():
                torch.rand((), device="cpu")
        if "running_mean" in given and (given.get("training") or given.get("train")):
            torch.autograd.graph.increment_version(
                [given[n] for n in ("running_mean", "running_var") if isinstance(given.get(n), Tensor)]
            )
        return result


@contextmanager
def _replace_by_fakes(module: nn.Module, device: torch.device) -> Iterator[Any]:
    """Put stand-ins on `device` in place of all weights and constants; yields what makes one of another tensor."""
    mode = _WatchedFakeMode()
    made: dict[int, Tensor] = {}
    originals: list[Tensor] = []  # one that is gone would lend its identity to another

    def imagine(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            originals.append(tensor)
            with mode, torch.no_grad():
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad)
            else:
                made[id(tensor)] = empty.requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    registries: list[dict[str, Any]] = []
    for part in module.modules():
        registries += [part._parameters, part._buffers]
    before = [(held, dict(held)) for held in registries]
    try:
        for held, own in before:
            held |= {name: None if t is None else imagine(t) for name, t in own.items()}
        with torch.random.fork_rng(devices=[]), mode:
            yield imagine
    finally:
        for held, own in before:
            held.clear()
            held.update(own)
