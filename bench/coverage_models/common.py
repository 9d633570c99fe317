"""Settings that all models share: four rows of small inputs, random weights, and no random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
Factory = Callable[[], Made]

ROWS, LENGTH, VOCABULARY, SIDE = 4, 16, 64, 64
"""Rows of a batch, tokens of a row, size of the vocabulary, and pixels along an image's side (see each table)."""


@contextmanager
def quick_init() -> Iterator[None]:
    """Draw truncated normals as plain normals inside the block, because a large network is then made much faster."""
    # Truncated normals are drawn by inverting a distribution, which takes minutes for a large network.
    slow = nn.init.trunc_normal_

    def quick(tensor: Tensor, mean: float = 0.0, std: float = 1.0, *bounds: Any, **more: Any) -> Tensor:
        return nn.init.normal_(tensor, mean, std)

    nn.init.trunc_normal_ = quick
    try:
        yield
    finally:
        nn.init.trunc_normal_ = slow


def prepare(model: nn.Module) -> nn.Module:
    """Turn off dropout, stochastic depth and drop path, fill parameters that begin as zeros, and return the model.

    A head of zeros would make every gradient before it zero, so a comparison of gradients would see nothing.
    """
    # Two runs of a model that draws cannot be compared.
    for module in model.modules():
        for name in ("p", "drop_prob", "dropout", "attn_drop_prob", "drop_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    for parameter in model.parameters():
        if not parameter.detach().any():
            nn.init.normal_(parameter, std=0.1)
    return model
