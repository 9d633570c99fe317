"""Models that make their number of rows a constant: one export for each size of microbatch, and one graph of them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import TraceError
from fxsplit.ir.facts.capture.scope import Scope

FAST = "profile{repeats=1},augment,order,partition,emit"


class Windows(nn.Module):
    """Computes its number of rows as an int() of a quotient of shapes, as Swin's own window code does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        pieces = self.a(x).view(-1, 2, 4)
        rows = int(pieces.shape[0] / (x.shape[1] / 2))
        h: Tensor = self.b(torch.tanh(pieces).view(rows, x.shape[1], 4))
        return h


class Samples(Windows):
    """Runs sample by sample: each number of rows is a graph of its own."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        made: Tensor = self.b(torch.stack([torch.tanh(h[i]) for i in range(int(x.shape[0] / 1))]))
        return made


class Cast(Windows):
    """Has the constant inside of a block of autocast."""

    def forward(self, x: Tensor) -> Tensor:
        rows = int(x.shape[0] / 1)
        with torch.autocast("cpu", enabled=False):
            h = self.a(x).view(rows, 16)
        made: Tensor = self.b(h.view(rows, 4, 4))
        return made


def make_rows(count: int) -> Tensor:
    return torch.randn(count, 4, 4, dtype=torch.float64)


def prove(model: nn.Module, sizes: list[int], n: int) -> fxsplit.Pipeline:
    """Return a pipeline that equals the model for batches of these sizes, and keeps no submodule whole."""
    reference = copy.deepcopy(model)
    pipe = fxsplit.compile(model, 2, n_microbatches=n, passes=FAST)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*stays whole")
        for count in sizes:
            x = make_rows(count)
            found, wanted = pipe(x), reference(x)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
            pairs = zip(
                torch.autograd.grad(found.square().sum(), [*model.parameters()]),
                torch.autograd.grad(wanted.square().sum(), [*reference.parameters()]),
                strict=True,
            )
            for got, expected in pairs:
                torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    assert list(model.state_dict()) == list(reference.state_dict())
    return pipe


def test_the_rows_of_microbatches_are_constants_and_the_plan_says_so() -> None:
    """Such a model was refused for several microbatches, or kept whole, though each export works at once."""
    torch.manual_seed(0)
    with prove(Windows().double(), [8, 7, 8, 2, 6], 2) as pipe:
        assert pipe.front_end == "export, rows fixed"
        assert pipe.plan.fixed_rows == (4,) and "microbatches of 4 rows only" in str(pipe.plan)


def test_two_sizes_of_microbatches_in_one_batch_are_one_graph() -> None:
    torch.manual_seed(0)
    with prove(Windows().double(), [9], 4) as pipe:
        assert pipe.traced[Scope].fixed_sizes == (3, 2) and "microbatches of 3 and 2 rows only" in str(pipe.plan)


def test_a_loop_over_rows_takes_batches_with_microbatches_of_one_size() -> None:
    torch.manual_seed(0)
    with (
        prove(Samples().double(), [4, 2], 2) as pipe,
        pytest.raises(TraceError, match="that n_microbatches divi"),
    ):
        pipe(make_rows(5))


def test_a_constant_inside_a_block_is_named_where_it_differs() -> None:
    torch.manual_seed(0)
    with prove(Cast().double(), [4], 2) as pipe, pytest.raises(TraceError, match="block of a mode, with other numbers"):
        pipe(make_rows(5))
