"""Batches cut into microbatches."""

from __future__ import annotations

import ast
import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.api.verify.compare import compare, run_pipeline_step, run_unsplit_step
from fxsplit.errors import InputError
from fxsplit.ir.facts.capture.call import Inputs
from fxsplit.ir.facts.capture.chunks import ChunkSpec
from fxsplit.ir.facts.capture.output_kinds import MEAN, OutputKind
from fxsplit.runtime.microbatches import divide_rows, join, split_gradient, split_target
from tests.support.models import FAST, Mlp

mse = F.mse_loss


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


@pytest.mark.parametrize("backward", [False, True])
def test_writing_to_the_input_in_place(backward: bool) -> None:
    """Microbatches are views of one tensor: a write to one is not a write to another, nor to the caller's batch."""
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    unsplit = copy.deepcopy(model)
    x = vectors(9).double()
    kept = x.clone()
    with fxsplit.compile(model, 2, n_microbatches=3, loss_fn=mse, passes=FAST) as pipe:
        if backward:
            y = torch.zeros(9, 3, dtype=torch.float64)
            expected = run_unsplit_step(unsplit, [x.clone()], y, mse, 3)
            assert compare(run_pipeline_step(pipe, [x], y), expected).largest <= 1e-10
        else:
            torch.testing.assert_close(pipe(x), unsplit(x.clone()))
    assert torch.equal(x, kept)


def test_no_rows() -> None:
    """It would be wrong if an empty batch failed in the middle of a stage."""
    refused = pytest.raises(InputError, match="give a batch of at least one row")
    with fxsplit.compile(Mlp(), 2, example_inputs=vectors(), passes=FAST) as pipe, refused:
        pipe(torch.zeros(0, 8))


OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


def test_a_target_is_cut_where_its_rows_are() -> None:
    """Once a target was cut on its first dimension, wherever the rows of the inputs are."""

    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(4, 4), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.rnn(x)[0])
            return out

    def loss_fn(outputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), target.flatten())

    model = Sequence()
    for length, chunks in ((8, {"x": 1, "target": 1}), (6, {"x": 1})):  # of six steps and eight rows, only rows fit
        x, y = torch.randn(length, 8, 4), torch.randint(0, 5, (length, 8))
        with fxsplit.compile(model, 2, chunks=chunks, loss_fn=loss_fn, **OPTIONS) as pipe:
            torch.testing.assert_close(pipe.step(x, target=y), loss_fn(model(x), y).detach())
    x, y = torch.randn(8, 8, 4), torch.randint(0, 5, (8, 8))
    with (
        fxsplit.compile(model, 2, chunks={"x": 1}, loss_fn=loss_fn, **OPTIONS) as pipe,
        pytest.raises(InputError, match=r"target has shape \(8, 8\) .*compile\(chunks={'target': 1}\)"),
    ):
        pipe.step(x, target=y)


class Last(nn.Module):
    """Reads (time, batch, features), and returns a row for each row of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(4, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.rnn(x)[0][-1])
        return out


@pytest.mark.parametrize(
    ("shape", "stated", "advice"),
    [
        ((8,), {}, "{'x': 1}"),
        ((8,), {"x": 1, "target": 1}, "{'target': 0}"),
        ((6,), {"x": 1}, "{'x': 0}"),
        ((7,), {"x": 1}, None),
    ],
)
def test_the_dimension_that_an_error_offers_is_right(shape: Any, stated: Any, advice: str | None) -> None:
    """The error always offered chunks={'target': 1}, also if that was stated, or if the input was cut wrongly."""
    model, x, y = Last(), torch.randn(6, 8, 4), torch.randint(0, 5, shape)
    with (
        fxsplit.compile(model, 2, chunks=stated, loss_fn=F.cross_entropy, **OPTIONS) as pipe,
        pytest.raises(InputError) as refused,
    ):
        pipe.step(x, target=y)
    offered = re.findall(r"compile\(chunks=({.*?})\)", str(refused.value))
    assert offered == ([] if advice is None else [advice]) and (advice or "n_microbatches=1" in str(refused.value))
    if shape == (8,):
        followed = {**stated, **ast.literal_eval(offered[0])}
        with fxsplit.compile(model, 2, chunks=followed, loss_fn=F.cross_entropy, **OPTIONS) as pipe:
            torch.testing.assert_close(pipe.step(x, target=y), F.cross_entropy(model(x), y).detach())


def test_rows_are_divided_evenly_the_larger_ones_first() -> None:
    for rows in range(1, 20):
        for n in range(1, rows + 1):
            found = divide_rows(rows, n)
            assert sum(found) == rows and len(found) == n and found == sorted(found, reverse=True)
            assert max(found) - min(found) <= 1
    with pytest.raises(InputError, match="3 rows cannot be cut into n_microbatches=4"):
        divide_rows(3, 4)


def test_pieces_join_to_the_whole_on_any_dimension() -> None:
    x, rows = torch.arange(21.0).reshape(3, 7), [3, 2, 2]
    pieces = ChunkSpec(1).split(x, rows)
    assert [p.shape[1] for p in pieces] == rows and pieces[1].data_ptr() == x[:, 3:].data_ptr(), "views"
    assert torch.equal(join(pieces, rows, OutputKind(dim=1)), x) and ChunkSpec(None).split(x, rows) == (x, x, x)
    assert torch.equal(join(ChunkSpec(0).split(x.t(), rows), rows), x.t()) and join([x], [7]) is x


@pytest.mark.parametrize(
    ("meaning", "shapes"),
    [
        (OutputKind(), [(3, 2), (2, 2), (2, 2)]),
        (OutputKind(dim=1), [(2, 3), (2, 2), (2, 2)]),
        (OutputKind(each=4), [(12, 2), (8, 2), (8, 2)]),
        (OutputKind("mean"), [()] * 3),
        (OutputKind("counted"), [(5,)] * 3),
        (OutputKind("sum"), [(5,)] * 3),
    ],
)
def test_gradients_of_pieces_are_those_of_joining(meaning: OutputKind, shapes: list[tuple[int, ...]]) -> None:
    rows = [3, 2, 2]
    pieces = [torch.randn(shape, requires_grad=True) for shape in shapes]
    whole = join(pieces, rows, meaning)
    gradient = torch.randn_like(whole)
    whole.backward(gradient)
    for piece, found in zip(pieces, split_gradient(gradient, rows, meaning), strict=True):
        torch.testing.assert_close(found, piece.grad)
    assert split_gradient(gradient, [7], meaning)[0] is gradient


def test_numbers_join_to_their_mean_by_rows() -> None:
    assert float(join([torch.tensor(7.0), torch.tensor(14.0)], [5, 2], MEAN)) == pytest.approx(5 + 4)


def test_what_is_the_same_for_all_microbatches_is_a_whole_gradient() -> None:
    """Each microbatch makes it, and their gradients add up to that of one."""
    ones = [torch.ones(2)] * 2
    assert torch.equal(join(ones, [2, 1], OutputKind("same")), ones[0])
    shares = [g for g in split_gradient(torch.ones(2), [2, 1], OutputKind("same")) if g is not None]
    assert torch.equal(shares[0] + shares[1], ones[0])
    with pytest.raises(InputError, match=r"every microbatch of the example gave the same value.*n_microbatches=1"):
        join([torch.tensor(3), torch.tensor(4)], [2, 1], OutputKind("same"))


def test_counts_and_flags_join() -> None:
    counts, flags = [torch.tensor(3), torch.tensor(4)], [torch.tensor(True), torch.tensor(False)]
    found = join(counts, [2, 1], OutputKind("sum"))
    assert found.dtype == torch.int64 and int(found) == 7
    assert not join(flags, [2, 1], OutputKind("all")) and join(flags, [2, 1], OutputKind("any"))
    with pytest.raises(InputError, match="why"):
        join(counts, [2, 1], OutputKind("unjoined", why="why"))


def test_targets_are_cut_where_they_have_the_rows() -> None:
    target = {"label": torch.arange(5), "weight": 0.5}
    found = split_target(target, [3, 2])
    assert [t["label"].tolist() for t in found] == [[0, 1, 2], [3, 4]] and [t["weight"] for t in found] == [0.5, 0.5]
    with pytest.raises(InputError, match=r"shape \(4,\) and the batch has 5 rows"):
        split_target(torch.arange(4), [3, 2])
    with pytest.raises(InputError, match=r"shape \(7,\) .* pad tensors of several lengths, .* n_microbatches=1"):
        split_target((torch.arange(7), torch.tensor([3, 1, 1, 1, 1])), [3, 2])
    # The labels of CTC may be concatenated, and a batch of one microbatch needs no cut.
    whole = (torch.arange(7), torch.tensor([3, 1, 1, 1, 1]))
    assert split_target(whole, [5]) == [whole]


def test_a_target_may_have_several_entries_for_each_row() -> None:
    inputs, _ = Inputs.of(nn.Identity(), [torch.zeros(3, 2)], {}, {"target": 0})
    assert [t.tolist() for t in split_target(torch.arange(6), [2, 1], inputs)] == [[0, 1, 2, 3], [4, 5]]
    for odd in (torch.arange(7), torch.arange(2), torch.tensor(1)):
        with pytest.raises(InputError, match="the batch has 3 rows"):
            split_target(odd, [2, 1], inputs)
