"""Tell tensors with values in this process from tensors without: fake, meta, remote and made-up tensors."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from fxsplit.torch_internals.fake.made_up import MadeUp


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is fake, as all tensors are inside `make_runnable(..., from_shapes=True)`."""
    return isinstance(tensor, FakeTensor)


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values in this process, so that it keeps what is written to it."""
    return not (is_fake(tensor) or tensor.is_meta or is_remote(tensor) or isinstance(tensor, MadeUp))
