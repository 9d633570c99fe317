"""Switch torch's dropout off for a block, so that two runs of a model are equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from fxsplit.torch_internals.scopes.undo import restore_after


@contextmanager
def disable_dropout() -> Iterator[None]:
    """Make torch's dropout functions and modules drop nothing inside the block."""
    # Dropout modules call these functions too, so patching the functions covers both.
    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    own = {name: getattr(F, name) for name in (*names, "scaled_dot_product_attention")}

    def drop_nothing(function: Any) -> Any:
        @wraps(function)
        def keep(input: Tensor, p: float = 0.0, training: bool = False, inplace: bool = False) -> Any:
            return function(input, 0.0, training, inplace)

        return keep

    @wraps(own["scaled_dot_product_attention"])
    def attend(query: Any, key: Any, value: Any, mask: Any = None, p: float = 0.0, *more: Any, **named: Any) -> Any:
        named = {"attn_mask": mask, **named, "dropout_p": 0.0}
        named |= dict(zip(("is_causal", "scale"), more, strict=False))
        return own["scaled_dot_product_attention"](query, key, value, **named)

    def put_back() -> None:
        for name, function in own.items():
            setattr(F, name, function)

    with restore_after(put_back):
        for name in names:
            setattr(F, name, drop_nothing(own[name]))
        F.scaled_dot_product_attention = attend  # type: ignore[assignment]
        yield
