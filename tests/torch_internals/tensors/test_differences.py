"""Differences between two runs."""

from __future__ import annotations

import torch

from fxsplit.torch_internals.tensors.differences import measure_difference


def test_differences_of_complex_sparse_and_missing_numbers() -> None:
    a = torch.tensor([1 + 1j, 2 + 2j])
    assert measure_difference(a, a.conj().clone()) > 0.5, "in the imaginary part alone"
    b = torch.tensor([1.0, float("nan"), float("inf")])
    assert measure_difference(b, b.clone()) == 0.0
    assert measure_difference(b, torch.tensor([1.0, 2.0, float("inf")])) == float("inf")
    assert measure_difference(b, torch.tensor([2.0, float("nan"), float("inf")])) == 0.5
    sparse = torch.eye(3).to_sparse()
    assert measure_difference(sparse, sparse.clone()) == 0.0 and measure_difference(2 * sparse, sparse) == 1.0
