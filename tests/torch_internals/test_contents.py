"""The values of tensors and arrays are compared with later values, and can be restored."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
import torch

from fxsplit.torch_internals.contents import MOST_BYTES, MOST_COPIED, MOST_READ, Contents, has_contents


@pytest.mark.parametrize(
    "holder",
    [
        torch.zeros(3),
        torch.tensor(0.0),
        torch.tensor([0.0, float("nan")]),
        np.zeros((2, 2)),
        np.array(0.0),
        bytearray(3),
        array.array("d", [0.0]),
    ],
)
def test_a_write_is_seen_and_undone(holder: Any) -> None:
    assert has_contents(holder)
    index = () if getattr(holder, "ndim", 1) == 0 else 0
    before = Contents(holder).keep()
    assert before.matches(Contents(holder)) and before.matches(Contents(holder).keep())
    holder[index] = 1
    changed = Contents(holder).keep()
    assert not before.matches(Contents(holder)) and not before.matches(changed)
    before.put_back()
    assert before.matches(Contents(holder)) and not before.matches(changed)
    assert not before.matches(Contents(torch.zeros(3)))


def test_a_write_of_the_same_values_is_no_change() -> None:
    scratch = torch.zeros(3)
    before = Contents(scratch).keep()
    scratch.zero_()
    assert before.matches(Contents(scratch))
    scratch.resize_(4)
    assert not before.matches(Contents(scratch))


def test_a_write_that_nobody_counts_is_seen_in_a_small_tensor() -> None:
    small, large = torch.zeros(3), torch.zeros(MOST_READ)
    before = [Contents(tensor).keep() for tensor in (small, large)]
    for tensor in (small, large):
        tensor.data.fill_(1.0)
    assert [then.matches(Contents(then.holder)) for then in before] == [False, True]


def test_an_inference_tensor_counts_no_writes() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
        before = Contents(tensor).keep()
        tensor.fill_(1)
        assert not before.matches(Contents(tensor))


def test_of_what_is_large_there_is_no_copy() -> None:
    tensor = torch.zeros(MOST_COPIED // 4 + 1)
    before = Contents(tensor).keep()
    assert before.matches(Contents(tensor))
    tensor.zero_()
    assert not before.matches(Contents(tensor))
    before.put_back()
    assert not has_contents(np.zeros(MOST_BYTES)) and not has_contents(np.array([object()]))
    assert not has_contents([1.0])


@pytest.mark.parametrize("tensor", [torch.zeros(3, device="meta"), torch.zeros(2, 2).to_sparse()])
def test_where_values_cannot_be_compared_writes_are_counted(tensor: torch.Tensor) -> None:
    before = Contents(tensor).keep()
    assert before.matches(Contents(tensor))
    tensor.zero_()
    assert not before.matches(Contents(tensor))
    before.put_back()


def test_what_was_held_is_shown_on_one_line() -> None:
    holder = np.eye(2)
    before = Contents(holder).keep()
    holder[:] = 0
    assert repr(before) == "array([[1., 0.], [0., 1.]])"
