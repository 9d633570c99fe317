"""Stages with a KV cache: it stays on its stage, and belongs to its rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.ir.facts.capture.call import Call
from fxsplit.runtime.job import channels
from fxsplit.runtime.job.channels import Inboxes, Message
from fxsplit.torch_internals.fx.kv_cache import KVCache, KVCaches, extend, use_kv_cache

LAYERS, WIDTH, ROWS = 4, 8, 6


class Steps(nn.Module):
    """Each layer adds to each entry a mean over its inputs of this call and of earlier calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        for slot, layer in enumerate(self.layers):
            every = torch.ops.fxsplit.extend(layer(x).unsqueeze(1), seen.shape[1], slot)
            x = x + torch.tanh(every.mean(2))
        return x


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Steps().double().eval()


@pytest.fixture(params=[1, 2, 3])
def pipe(request: pytest.FixtureRequest, model: nn.Module) -> Iterator[fxsplit.Pipeline]:
    example = {"x": torch.randn(ROWS, 1, WIDTH, dtype=torch.float64), "seen": torch.ones(ROWS, 9)}
    with fxsplit.compile(model, request.param, example_inputs=example, n_microbatches=3, inference=True) as pipe:
        yield pipe


def run(pipe: fxsplit.Pipeline, kv_caches: KVCaches, x: Tensor, total: int) -> Tensor:
    batch, engine = pipe._prepare_forward(Call((x, torch.ones(len(x), total)), {}))
    return batch.program.build_result(engine.forward(batch._replace(kv_caches=kv_caches)))  # type: ignore[no-any-return]


def test_calls_go_on_from_where_the_last_ones_were(pipe: fxsplit.Pipeline, model: nn.Module) -> None:
    wanted, found = [], []
    kv_cache, kv_caches = KVCache(), KVCaches()
    for total in range(1, 7):
        x = torch.randn(ROWS, 1, WIDTH, dtype=torch.float64)
        with torch.no_grad(), use_kv_cache(kv_cache):
            wanted.append(model(x, torch.ones(ROWS, total)))
        found.append(run(pipe, kv_caches, x, total))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    # Each stage caches only its own layers' inputs, for each microbatch.
    counts = {stage: len(kv_caches.find(stage, 0).list_tensors()) for stage in range(len(pipe.stages))}
    assert sum(counts.values()) == LAYERS and all(counts.values())
    assert set(kv_caches.kept) == {(stage, m) for stage in counts for m in range(3)}
    assert all(t.shape == (2, 1, 6, WIDTH) for kv_cache in kv_caches.kept.values() for t in kv_cache.list_tensors())


def test_two_runs_of_calls_do_not_mix(pipe: fxsplit.Pipeline) -> None:
    first, second = KVCaches(), KVCaches()
    a, b = torch.randn(2, ROWS, 1, WIDTH, dtype=torch.float64)
    alone = [run(pipe, first, a, 1), run(pipe, first, b, 2)]
    mixed, third = [], KVCaches()
    for total, x in enumerate((a, b), 1):
        mixed.append(run(pipe, second, x, total))
        run(pipe, third, torch.zeros_like(x), total)
    assert all(torch.equal(x, y) for x, y in zip(alone, mixed, strict=True))


def test_what_is_kept_is_sent_nowhere(pipe: fxsplit.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def count(inboxes: Inboxes, device: int, message: Message, send: object = Inboxes.send) -> None:
        # A tensor that only carries the length of the cache is sent too, and not counted.
        sent.append(sum(v.nbytes for v in message.values if isinstance(v, Tensor) and v.dtype == torch.float64))
        send(inboxes, device, message)  # type: ignore[operator]

    monkeypatch.setattr(channels.Inboxes, "send", count)
    kv_caches, x = KVCaches(), torch.randn(ROWS, 1, WIDTH, dtype=torch.float64)
    by_length = []
    for total in range(1, 6):
        sent.clear()
        run(pipe, kv_caches, x, total)
        by_length.append(sum(sent))
    assert len(set(by_length)) == 1, "a longer past makes nothing longer that is sent"
    assert bool(by_length[0]) == (len(pipe.stages) > 1)


def test_the_plan_counts_what_is_kept_of_all_microbatches(pipe: fxsplit.Pipeline) -> None:
    kept = [n.buffer_bytes for n in pipe.costs.nodes if "extend" in n.op]
    # The example's past has 9 entries; a microbatch has two rows of the six.
    assert kept == [ROWS * 9 * WIDTH * 8] * LAYERS


def test_a_past_of_other_calls_is_refused(pipe: fxsplit.Pipeline) -> None:
    kv_caches, x = KVCaches(), torch.randn(ROWS, 1, WIDTH, dtype=torch.float64)
    run(pipe, kv_caches, x, 1)
    with pytest.raises(ValueError, match="has 1 entries, and 1 more do not make 7"):
        run(pipe, kv_caches, x, 7)


def test_without_pasts_a_call_keeps_nothing(pipe: fxsplit.Pipeline) -> None:
    x = torch.randn(ROWS, 1, WIDTH, dtype=torch.float64)
    assert torch.equal(pipe(x, torch.ones(ROWS, 4)), pipe(x, torch.ones(ROWS, 4)))
    assert extend(x.unsqueeze(1), 4, 0).shape[2] == 4
