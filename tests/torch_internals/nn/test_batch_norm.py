"""Running statistics of batch norm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import InputError
from fxsplit.torch_internals.nn.batch_norm import (
    DeferredBatchNorm,
    count_as_one_batch,
    is_batch_norm,
    merge_statistics,
    note_nothing,
)
from fxsplit.torch_internals.random.seeded_calls import take_turn
from tests.support.models import FAST


def test_statistics_that_begin_to_move_later_move_once() -> None:
    """Recomputation moved the statistics a second time if the first step had not changed them."""
    found = []
    for recompute in ("never", "always"):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.0), nn.Linear(8, 8)), torch.randn(8, 8)
        options: Any = {"n_microbatches": 4, "loss_fn": F.mse_loss, "passes": FAST, "example_inputs": x}
        with fxsplit.compile(model, ["cpu"] * 2, recompute=recompute, **options) as pipe:
            pipe.step(x, target=x)
            model[1].momentum = 0.1  # type: ignore[assignment]
            pipe.step(x, target=x)
        found.append(list(model.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and float(found[0][0].abs().max()) > 0


@pytest.mark.parametrize("sizes", [[4], [4, 3, 5], [1, 6]])
def test_merged_statistics_are_those_of_all_values(sizes: list[int]) -> None:
    pieces = [torch.randn(n, 3, dtype=torch.float64) * (i + 1) + 1e6 * i for i, n in enumerate(sizes)]
    calls = [(len(p), p.mean(0), p.var(0) if len(p) > 1 else torch.zeros(3, dtype=torch.float64)) for p in pieces]
    count, mean, variance = merge_statistics(calls)
    whole = torch.cat(pieces)
    assert count == len(whole)
    torch.testing.assert_close(mean, whole.mean(0))
    torch.testing.assert_close(variance, whole.var(0))


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("at_once", [True, False])
def test_noted_statistics_are_those_of_the_layer(momentum: float | None, at_once: bool) -> None:
    """Compare with the layer itself, called per microbatch in order, or once with all rows."""
    layer = nn.BatchNorm1d(3, momentum=momentum).double()
    alone, noted = copy.deepcopy(layer), DeferredBatchNorm(layer, at_once, {})
    pieces = [torch.randn(4, 3, dtype=torch.float64) for _ in range(3)]
    with count_as_one_batch([noted]):
        for m in (2, 0, 1):  # microbatches of replicas pass in any order
            with take_turn(0, m):
                outputs = noted(pieces[m])
            torch.testing.assert_close(outputs, F.batch_norm(pieces[m], None, None, layer.weight, layer.bias, True))
        assert int(layer.num_batches_tracked) == 0  # type: ignore[arg-type]
    for piece in [torch.cat(pieces)] if at_once else pieces:
        alone(piece)
    for one, other in zip(layer.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_what_recomputes_fails_or_evaluates_counts_for_nothing() -> None:
    layer, x = nn.BatchNorm1d(3), torch.randn(4, 3)
    noted = DeferredBatchNorm(layer, True, {})
    before = [b.clone() for b in layer.buffers()]
    with count_as_one_batch([noted]), note_nothing():
        noted(x)
    with pytest.raises(ValueError, match="broken"), count_as_one_batch([noted]):
        noted(x)
        raise ValueError("broken")
    layer.eval()
    with count_as_one_batch([noted]):
        assert torch.equal(noted(x), layer(x))
    assert all(torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True))
    layer.train()
    with count_as_one_batch([noted]):
        copy.deepcopy(noted)(input=x)  # a replica's copy notes in the same place
    assert int(layer.num_batches_tracked) == 1  # type: ignore[arg-type]


class Renorm(nn.BatchNorm1d):
    """Scales its outputs by a running statistic."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) * self.get_buffer("running_mean")
        return out


class Same(nn.BatchNorm1d):
    """Computes as a batch norm does, in a forward() of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_layer_that_computes_with_running_statistics_is_refused() -> None:
    DeferredBatchNorm(Same(3), True, {})(torch.randn(4, 3))
    with pytest.raises(InputError, match="Renorm computes with its running statistics in training"):
        DeferredBatchNorm(Renorm(3), True, {})(torch.randn(4, 3))


@pytest.mark.parametrize("module", [nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.LazyBatchNorm2d()])
def test_batch_norms_are_told(module: nn.Module) -> None:
    assert is_batch_norm(module)


@pytest.mark.parametrize("other", [nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.Dropout(), None])
def test_other_layers_are_no_batch_norms(other: object) -> None:
    assert not is_batch_norm(other)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_are_counted_on_their_own_device(momentum: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host read how many batches a layer has seen, and waited for an accelerator in each batch."""

    def refuse(self: Tensor) -> int:
        raise AssertionError("the host reads a tensor")

    layer, unsplit = nn.BatchNorm1d(3, momentum=momentum), nn.BatchNorm1d(3, momentum=momentum)
    noted, batches = DeferredBatchNorm(layer, True, {}), torch.randn(4, 5, 3)
    for x in batches:
        unsplit(x)
    with monkeypatch.context() as patched:
        for x in batches:
            with count_as_one_batch([noted]):
                noted(x)
                patched.setattr(Tensor, "__int__", refuse)
            patched.undo()
    for mine, its in zip(layer.buffers(), unsplit.buffers(), strict=True):
        torch.testing.assert_close(mine, its)
