"""pipe.stream() over ranks: outputs on every rank, in order, without gradients, and clean ends."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import InputError, RankError, RanksDiffer
from tests.support.models import FAST, Mlp
from tests.support.ranks import ranks


class Picky(nn.Module):
    """Refuses a batch that begins with a large number, in the first stage."""

    def forward(self, x: Tensor) -> Tensor:
        return refuse(x)


def refuse(x: Tensor) -> Tensor:
    if float(x[0, 0]) > 100:
        raise ValueError("too large")
    return x


torch.fx.wrap("refuse")


def compile_model() -> tuple[fxsplit.Pipeline, nn.Module]:
    """Return a pipeline over all ranks, and the unsplit model."""
    torch.manual_seed(0)
    model = nn.Sequential(Picky(), Mlp(4)).double()
    return fxsplit.compile(model, "world", n_microbatches=3, passes=FAST), copy.deepcopy(model)


def make_batches(*rows: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(count, 8, generator=made).double() for count in rows]


def stream(rank: int, n: int) -> str:
    """Return the type of the error of a bad batch. All else is compared here."""
    batches = make_batches(6, 4, 6)
    pipe, unsplit = compile_model()
    given: list[Any] = [batches[0], (batches[1],), {"input": batches[2]}]
    with torch.no_grad():
        expected = [unsplit(x) for x in batches]
    found = list(pipe.stream(iter(given)))
    assert pipe.plan.schedule == "Inference" and torch.is_grad_enabled()
    assert len(found) == len(expected) and not any(y.requires_grad for y in found)
    for output, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(output, whole, rtol=1e-12, atol=1e-12)
    # After an early exit the pipeline can be used at once.
    for output in pipe.stream(given):
        torch.testing.assert_close(output, expected[0], rtol=1e-12, atol=1e-12)
        break
    # A batch's error comes in the place of its output, and ends the stream on all ranks.
    stream = pipe.stream([batches[0], batches[1] + 1000, batches[2]])
    next(stream)
    with pytest.raises(ValueError, match="too large") as caught:
        next(stream)
    assert isinstance(caught.value, RankError) == (rank > 0) and list(stream) == []
    torch.testing.assert_close(next(pipe.stream(given)), expected[0], rtol=1e-12, atol=1e-12)
    pipe.close()
    return type(caught.value).__name__


def test_streams_run_over_ranks() -> None:
    first, *others = ranks(3, stream)
    assert first != "RankError" and others == ["RankError"] * 2


def read(rank: int, n: int) -> str:
    """Return the error if one rank reads other batches."""
    pipe, _ = compile_model()
    batches = make_batches(6, 4, 2)

    def choose() -> Iterator[Tensor]:
        yield batches[0]
        yield batches[1 + rank]

    stream = pipe.stream(choose())
    next(stream)
    with pytest.raises(RanksDiffer) as caught:
        next(stream)
    with pytest.raises(InputError, match="takes an iterable of batches"):
        pipe.stream(batches[0])
    pipe.close()
    return str(caught.value)


def test_ranks_that_read_other_batches_are_told() -> None:
    assert all("rank 1 has inputs of other shapes: float64[2, 8]" in text for text in ranks(2, read))
