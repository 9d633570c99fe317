"""Arguments without a common batch dimension."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import InputError
from fxsplit.ir.facts.capture.chunks import ChunkSpec, Replicate, find_cuts
from tests.support.models import FAST
from tests.support.refusals import refused


def x(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


def test_inputs_without_a_common_batch() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            result: Tensor = self.a(x) * mask
            return result

    with refused(InputError, r"argument 'mask' has shape \(1, 8\) and 'x' has 8 rows: state whether"):
        fxsplit.compile(Two(), 2, example_inputs=(x(), torch.ones(1, 8)))
    with refused(InputError, "without any tensor"):
        fxsplit.compile(Two(), 2, example_inputs=(1, 2))


def find(chunks: Any = None, **shapes: tuple[int, ...]) -> dict[str, int | None]:
    found = find_cuts({n: torch.empty(s) for n, s in shapes.items()}, {n: n[0] for n in shapes}, chunks or {})
    assert all(cut.each == 1 for cut in found.values())
    return {name: cut.dim for name, cut in found.items()}


def test_the_first_tensor_tells_the_rows() -> None:
    assert find(x=(6, 4), y=(6,), z=(5, 4)) == {"x": 0, "y": 0, "z": None}
    assert find(s=(), x=(6, 4)) == {"s": None, "x": 0}, "a single number has no rows"
    assert find(s=()) == {"s": None}
    assert find(x=(1, 4), y=(3, 1)) == {"x": 0, "y": None}, "of one row any length of one would be in doubt"


def test_what_is_stated_counts_first() -> None:
    assert find({"y": 1}, x=(4, 6), y=(5, 4)) == {"x": 0, "y": 1}
    assert find({"x": Replicate}, x=(6, 4), y=(5,)) == {"x": None, "y": 0}
    assert find({"e": 1}, x=(4,), e_a=(2, 4), e_b=(3, 4)) == {"x": 0, "e_a": 1, "e_b": 1}, "by its argument"
    assert find({"e": 1, "e_b": 0}, x=(4,), e_a=(2, 4), e_b=(4, 4)) == {"x": 0, "e_a": 1, "e_b": 0}, "by its own name"
    assert find({"target": 1}, x=(6,)) == {"x": 0}


def test_a_row_may_have_several_entries() -> None:
    shapes = {"x": torch.empty(4, 5), "y": torch.empty(3, 8), "z": torch.empty(6)}
    found = find_cuts(shapes, {n: n for n in shapes}, {"x": 0, "y": 1})
    assert found == {"x": ChunkSpec(0), "y": ChunkSpec(1, 2), "z": ChunkSpec(None)}, (
        "the shortest that is stated tells the rows"
    )
    y = torch.arange(8).repeat(3, 1)
    pieces = found["y"].split(y, [3, 1])
    assert [p[0].tolist() for p in pieces] == [[0, 1, 2, 3, 4, 5], [6, 7]]
    assert torch.equal(found["y"].join(pieces), y) and found["y"].narrow(y, 1, 2)[0].tolist() == [2, 3, 4, 5]
    assert found["z"].split(y, [3, 1]) == (y, y) and found["z"].narrow(y, 1, 2) is y is found["z"].join([y, y])


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ({}, r"'y' has shape \(2, 6\) and 'x' has 6 rows: .*dimension 1, chunks={'y': 1}"),
        ({"z": 0}, "names no tensor argument: there are x, y"),
        ({"y": 2}, r"chunks={'y': 2}: it has shape \(2, 6\)"),
        ({"y": -1}, r"chunks={'y': -1}"),
        ({"y": True}, "give the number of a dimension"),
        ({"y": "0"}, "give the number of a dimension"),
    ],
)
def test_doubts_and_mistakes_are_refused(chunks: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find(chunks, x=(6, 4), y=(2, 6))


def test_the_advice_for_an_argument_that_is_sometimes_none_works_in_both_calls() -> None:
    """chunks={'h_0': 1} was the advice for the state (h, c) of an LSTM, and was refused in calls without a state."""

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: Tensor, h: tuple[Tensor, Tensor] | None = None) -> Tensor:
            out: Tensor = self.out(self.rnn(x, h)[0])
            return out

    model, x, h = Remembers(), torch.randn(8, 5, 4), (torch.randn(1, 8, 6), torch.randn(1, 8, 6))
    options: Any = {"n_microbatches": 2, "passes": FAST}
    with (
        fxsplit.compile(model, 2, example_inputs=x, **options) as pipe,
        pytest.raises(InputError, match=r"'h_0' has shape .* chunks={'h': 1}, or shared by all, chunks={'h'"),
    ):
        pipe(x, h)
    for chunks in ({"h": 1}, {"h_0": 1, "h_1": 1}):
        with fxsplit.compile(model, 2, example_inputs=x, chunks=chunks, **options) as pipe:
            torch.testing.assert_close(pipe(x), model(x))
            torch.testing.assert_close(pipe(x, h), model(x, h))


def test_parts_with_rows_in_different_dimensions_are_advised_apart() -> None:
    with pytest.raises(InputError, match=r"chunks={'h_0': 1}"):
        find(x=(6, 4), h_0=(2, 6), h_1=(2, 3, 6))
