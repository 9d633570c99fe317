"""A vmap that an exported program enters is left, even if the program fails inside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._functorch.predispatch import _add_batch_dim, _remove_batch_dim, _vmap_increment_nesting

from fxsplit.torch_internals.fx.vmap import is_transformed, run_vmap


def begin_and_fail(x: Tensor) -> Tensor:
    _vmap_increment_nesting(2, "error")
    _vmap_increment_nesting(3, "error")
    raise ValueError("in between")


def begin(x: Tensor) -> Tensor:
    _vmap_increment_nesting(2, "error")
    assert is_transformed()
    found: Tensor = _remove_batch_dim(_add_batch_dim(x, 0, 1).sum(), 1, 2, 0)
    return found


def test_nothing_stays_under_way() -> None:
    with pytest.raises(ValueError, match="in between"):
        run_vmap(begin_and_fail, torch.ones(2, 3))
    assert not is_transformed()
    torch.testing.assert_close(run_vmap(begin, torch.ones(2, 3)), torch.full((2,), 3.0))
    assert not is_transformed()
