"""The memory of a toy's tensor in torch's terms, `tensor.untyped_storage()`: to compare, copy, and look at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.accelerator.tensors import Toy, share_storage


class ToyStorage:
    """The memory of `base`, a tensor of a toy, and of all its views."""

    def __init__(self, base: Toy) -> None:
        self.base, self.device = base, base.device
        # torch's own storage has no values here, only an address and a reference count.
        self._own = torch.Tensor.untyped_storage(base)
        self._cdata = self._own._cdata

    def nbytes(self) -> int:
        return self.base.raw.untyped_storage().nbytes()

    size = __len__ = nbytes

    def data_ptr(self) -> int:
        return self.base.raw.untyped_storage().data_ptr()

    def clone(self) -> ToyStorage:
        """Return a copy, made by one kernel."""
        numbers = view_storage(self, torch.empty(0, dtype=torch.uint8, device=self.device), 0, (self.nbytes(),), (1,))
        return ToyStorage(numbers.clone())  # type: ignore[arg-type]


def view_storage(storage: ToyStorage, like: Tensor, offset: int, shape: Any, stride: Any) -> Toy:
    """Return a tensor of the dtype of `like` in the memory of a storage."""
    raw = torch.empty(0, dtype=like.dtype).set_(storage.base.raw.untyped_storage(), offset, shape, stride)
    made = Toy(raw, storage.device, storage.base.block)
    share_storage(made, storage.base)
    return made


def get_storage(tensor: Toy) -> ToyStorage:
    return ToyStorage(tensor)


def set_storage(tensor: Toy, source: Any, offset: int = 0, shape: Any = None, stride: Any = None) -> Tensor:
    """Return the result of `tensor.set_(storage, ...)`; `tensor` itself stays unchanged, and no test reads it again."""
    if not isinstance(source, ToyStorage):
        return torch.Tensor.set_(tensor, source, offset, shape, stride)
    if shape is None:
        shape, stride = (source.nbytes() // tensor.element_size(),), (1,)
    return view_storage(source, tensor, offset, shape, stride)


Toy.untyped_storage = get_storage  # type: ignore[assignment,method-assign]
Toy.set_ = set_storage  # type: ignore[assignment,method-assign]
