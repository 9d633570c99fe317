"""Tensors of the made-up accelerator: each has its real `.device`, and its values in a CPU tensor.

torch calls `Toy.__torch_dispatch__` for every operator on such a tensor, below autograd. So autograd, its engine and
nn.Module see tensors of an accelerator, and the CPU computes the values at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from tests.support.accelerator.record import Access, Block

T = TypeVar("T")
Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Maps an operator, its arguments and its keyword arguments to its result."""


class Toy(torch.Tensor):
    """A tensor of a toy, or a CPU tensor that a toy fills. `raw` has the values, and `block` is the memory.

    block: None outside of use_accelerator. ready: the copy after which a CPU tensor has its values. The other
    attributes are for `engine.EngineStreams`, which adds them.
    """

    raw: Tensor
    block: Block | None
    ready: Access | None
    made_on: Any
    dispatch: Dispatch
    """Runs operators; replaced by `kernels.run_operator` (the two modules would import each other)."""

    @staticmethod
    def __new__(cls, raw: Tensor, device: torch.device, block: Block | None = None, ready: Access | None = None) -> Toy:
        made: Toy = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=device,
        )
        made.raw, made.block, made.ready = raw, block, ready
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return Toy.dispatch(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Toy({self.raw!r}, device='{self.device}')"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.cpu().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Like Tensor and Parameter: the copy is a new leaf, and has memory of its own.
        if id(self) not in memo:
            made = self.detach().clone().requires_grad_(self.requires_grad)
            made.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("raw", "block", "ready")})
            memo[id(self)] = made
        return memo[id(self)]


def find_storage(tensor: Tensor) -> int:
    """Return a number that two CPU-backed tensors have in common exactly if they share memory."""
    return int(tensor.untyped_storage()._cdata)


def share_storage(made: Tensor, base: Tensor) -> None:
    """Let a view have its base's storage, which torch demands of views."""
    with no_dispatch():
        before = torch._C._meta_in_tls_dispatch_include()
        # With this flag set_ changes the tensor's fields, and looks for no kernel.
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            torch.ops.aten.set_.source_Storage_storage_offset(
                made, torch.Tensor.untyped_storage(base), made.storage_offset(), made.shape, made.stride()
            )
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)


def set_data(tensor: Tensor, value: Tensor) -> None:
    """Do `tensor.data = value`, also from a CPU tensor to a toy's, which torch cannot."""
    plain = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]
    if isinstance(tensor, Toy) and isinstance(value, Toy):
        tensor.raw, tensor.block, tensor.ready = value.raw, value.block, value.ready
        plain(tensor, value)
    elif isinstance(tensor, Toy) or isinstance(value, Toy):
        # The Python object stays, because the model and optimizers hold it; everything else comes from the other
        # tensor.
        other = value.detach().requires_grad_(tensor.requires_grad)
        extra = {k: v for k, v in tensor.__dict__.items() if k not in ("raw", "block", "ready")}
        if tensor.grad is not None:
            raise NotImplementedError("a gradient would stay where it is: set .grad to None before")
        hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
        parameter = isinstance(tensor, torch.nn.Parameter)
        other.__dict__.update(extra)
        torch._C._swap_tensor_impl(tensor, other)
        kept = dict(other.__dict__)
        plain_class = torch.nn.Parameter if parameter else torch.Tensor
        tensor.__class__ = Toy if isinstance(value, Toy) else plain_class
        tensor.__dict__.clear()
        tensor.__dict__.update(kept)
        if parameter and isinstance(value, Toy):
            tensor._is_param = True
        tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks
    else:
        plain(tensor, value)


def unwrap(value: Any) -> Any:
    """Return arguments with the values of toys in place of the toys."""
    return map_tensors(Toy, lambda toy: toy.raw, value)


def map_tensors(kind: type[T], change: Callable[[T], Any], value: Any) -> Any:
    """Return arguments or results of an operator with every tensor of a kind changed."""
    if isinstance(value, kind):
        return change(value)
    # Nearly all are tensors, numbers, or lists of these; torch's own function takes ten times as long for them.
    if type(value) in (list, tuple):
        return type(value)([map_tensors(kind, change, each) for each in value])
    if type(value) is dict:
        return {name: map_tensors(kind, change, each) for name, each in value.items()}
    return pytree.tree_map_only(kind, change, value) if isinstance(value, (list, tuple, dict)) else value
