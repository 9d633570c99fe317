"""Sparse tensors are identified, saved and compared by the strided tensors that hold them."""

from __future__ import annotations

import pytest
import torch

from fxsplit.torch_internals.fake.snapshot import keep_values
from fxsplit.torch_internals.fx.interpret import get_storage_id
from fxsplit.torch_internals.tensors.sparse_layouts import count_bytes, list_parts

LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]


def make(layout: torch.layout) -> torch.Tensor:
    dense = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    return dense.to_sparse(layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_parts_hold_the_tensor(layout: torch.layout) -> None:
    sparse = make(layout)
    values, *indices = list_parts(sparse)
    assert values.tolist() == [2.0, 3.0] and indices
    assert count_bytes(sparse) == sum(p.nbytes for p in list_parts(sparse)) > values.nbytes
    assert get_storage_id(sparse) == get_storage_id(values) != get_storage_id(make(layout))
    dense = torch.ones(3)
    assert list_parts(dense)[0] is dense and count_bytes(dense) == 12


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_values_are_kept(layout: torch.layout) -> None:
    """torch.equal knows no sparse tensors: any model with one in a buffer failed with torch's own error."""
    sparse = make(layout)
    with keep_values([sparse]) as kept:
        assert not kept.changed()
        list_parts(sparse)[0].mul_(5)
        assert kept.changed()
    assert list_parts(sparse)[0].tolist() == [2.0, 3.0]
