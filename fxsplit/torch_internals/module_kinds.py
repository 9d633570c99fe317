"""Tell which kind of layer a module is, where torch keeps the base class of the kind private."""

from __future__ import annotations

from typing import Any, TypeGuard

from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd


def is_batch_norm(module: Any) -> TypeGuard[_BatchNorm]:
    """Return whether a module is a batch norm of any number of dimensions, SyncBatchNorm and lazy ones included."""
    return isinstance(module, _BatchNorm)


def is_dropout(module: Any) -> TypeGuard[_DropoutNd]:
    """Return whether a module drops values at random in training: Dropout, Dropout1d, AlphaDropout and so on."""
    return isinstance(module, _DropoutNd)
