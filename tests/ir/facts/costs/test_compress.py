"""In how many bytes values cross: as many as the runtime sends."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from fxsplit.errors import InputError
from fxsplit.ir.facts.costs.compress import check_compress, count_sent_bytes, find_row_length
from fxsplit.runtime.job.compress import compress
from fxsplit.torch_internals.fx.interpret import describe_tensor

SHAPES = [(8, 64), (8, 3), (8, 5), (3,), (), (2, 5, 16), (4, 16, 7, 7), (2, 3, 32, 32), (2, 0), (1, 1)]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]


@pytest.mark.parametrize("how", ["bf16", "int8"])
def test_bytes_are_those_that_are_sent(how: str) -> None:
    for shape, dtype in product(SHAPES, DTYPES):
        value = torch.ones(shape).to(dtype)
        sent, _ = compress([value], [], how)
        there = sum(t.nbytes for t in sent if t is not None)
        assert count_sent_bytes(how, describe_tensor(value), float(value.nbytes)) == there, (shape, dtype)


def test_rows_are_long_and_never_those_of_two_samples() -> None:
    found = {shape: find_row_length(shape) for shape in SHAPES}
    assert list(found.values()) == [64, 3, 5, 1, 1, 80, 784, 1024, 1, 1]


def test_what_is_not_known_is_as_large_as_it_is() -> None:
    assert count_sent_bytes("int8", "tuple", 7.0) == 7.0 and count_sent_bytes("", "float32[8]", 32.0) == 32.0
    assert count_sent_bytes("bf16", "float32[8]", 0.0) == 0.0, "no gradient returns"


def test_other_ways_are_refused() -> None:
    check_compress(None)
    with pytest.raises(InputError, match="compress='fp8': give 'bf16' or 'int8'"):
        check_compress("fp8")
