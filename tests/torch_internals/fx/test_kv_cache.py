"""KV caches: room that grows, operators that use the thread's cache, and graphs that contain them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxsplit.torch_internals.fx.kv_cache import KVCache, KVCaches, extend, find_slot, recall, use_kv_cache


def make_entries(length: int, first: int = 0) -> Tensor:
    """Return entries of 2 rows, 3 heads and 4 features, which differ."""
    return torch.arange(2 * 3 * length * 4, dtype=torch.float64).view(2, 3, length, 4) + 100 * first


@pytest.mark.parametrize("most", [0, 5, 100])
def test_entries_are_added_behind_those_there_are(most: int) -> None:
    kv_cache, parts = KVCache(most), [make_entries(3), make_entries(1, 1), make_entries(1, 2), make_entries(4, 3)]
    for i in range(len(parts)):
        wanted = torch.cat(parts[: i + 1], 2)
        assert torch.equal(kv_cache.extend(7, parts[i], wanted.shape[2]), wanted)
        assert torch.equal(kv_cache.recall(7), wanted)
    assert [t.shape[2] for t in kv_cache.list_tensors()] == [9]


def test_what_is_returned_may_be_written_to() -> None:
    kv_cache = KVCache()
    kv_cache.extend(0, make_entries(2), 2).zero_()
    kv_cache.recall(0).zero_()
    assert torch.equal(kv_cache.recall(0), make_entries(2))


def test_room_is_made_once_where_the_length_is_known() -> None:
    kv_cache = KVCache(most=50)
    kv_cache.extend(0, make_entries(2), 2)
    there = kv_cache.list_tensors()[0].data_ptr()
    for total in range(3, 51):
        kv_cache.extend(0, make_entries(1), total)
    assert kv_cache.list_tensors()[0].data_ptr() == there


def test_a_total_that_does_not_come_about_is_refused() -> None:
    kv_cache = KVCache()
    kv_cache.extend(3, make_entries(2), 2)
    with pytest.raises(ValueError, match="slot 3 of the KV cache has 2 entries, and 1 more do not make 5"):
        kv_cache.extend(3, make_entries(1), 5)


def test_each_stage_and_microbatch_has_a_past_of_its_own() -> None:
    kv_caches = KVCaches(most=4)
    assert kv_caches.find(0, 1) is kv_caches.find(0, 1) is not kv_caches.find(1, 0)
    assert kv_caches.find(1, 0).most == 4 and len(kv_caches.kept) == 2


def test_threads_do_not_see_each_others_past() -> None:
    here, there = KVCache(), KVCache()
    found: list[Tensor] = []

    def run_elsewhere() -> None:
        with use_kv_cache(there):
            found.append(extend(make_entries(1), 1, 0))

    with use_kv_cache(here):
        extend(make_entries(2), 2, 0)
        thread = threading.Thread(target=run_elsewhere)
        thread.start()
        thread.join()
        assert extend(make_entries(1), 3, 0).shape[2] == 3
    assert found[0].shape[2] == 1 and there.recall(0).shape[2] == 1


def test_without_a_past_entries_are_made_up_and_nothing_is_kept() -> None:
    """So a graph can be compared with its model, on whole batches and on pieces of them."""
    new = make_entries(2)
    found = extend(new, 5, 1)
    assert found.shape == (2, 3, 5, 4) and torch.equal(found[:, :, 3:], new)
    assert torch.equal(found, extend(new, 5, 1))
    assert torch.equal(found[:1], extend(new[:1], 5, 1)), "a row has the same, whichever others there are"
    assert not torch.equal(found[:, :, :3], extend(new, 5, 2)[:, :, :3]), "another slot has others"
    rows = torch.ones(2, 9)
    recalled = recall(rows, 3, 9, 4, torch.float64, 1)
    assert recalled.shape == (2, 3, 9, 4) and recalled.dtype == torch.float64 and recalled.is_contiguous()


def test_gradients_reach_what_is_new() -> None:
    new = make_entries(2).requires_grad_()
    weights = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    (extend(new, 5, 0) * weights).sum().backward()
    assert new.grad is not None and torch.equal(new.grad, weights[:, :, 3:])


def add_up(new: Tensor, mask: Tensor) -> Tensor:
    return extend(new, mask.shape[1], 0).sum(2) + recall(mask, 3, mask.shape[1], 4, torch.float64, 1).sum(2)


def export(new: Tensor, mask: Tensor) -> Callable[..., Any]:
    class Model(torch.nn.Module):
        def forward(self, new: Tensor, mask: Tensor) -> Tensor:
            return add_up(new, mask)

    shapes = ({0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC})
    return torch.export.export(Model(), (new, mask), dynamic_shapes=shapes).module()


def trace(new: Tensor, mask: Tensor) -> Callable[..., Any]:
    return fx.symbolic_trace(add_up)


def compile_whole(new: Tensor, mask: Tensor) -> Callable[..., Any]:
    return torch.compile(add_up, backend="eager", dynamic=True, fullgraph=True)


@pytest.mark.parametrize("make", [trace, export, compile_whole])
def test_graphs_hold_the_operators_and_any_length(make: Callable[..., Any]) -> None:
    # torch.export takes an argument of one entry for a constant.
    new, mask = make_entries(2), torch.ones(2, 6)
    graph = make(new, mask)
    for mask in (torch.ones(2, 6), torch.ones(2, 9)):
        assert torch.equal(graph(new, mask), add_up(new, mask))
    kv_cache = KVCache()
    with use_kv_cache(kv_cache):
        kv_cache.extend(0, make_entries(1), 1)
        kv_cache.extend(1, make_entries(3), 3)
        assert torch.equal(graph(new, torch.ones(2, 3)), kv_cache.recall(0).sum(2) + kv_cache.recall(1).sum(2))


def test_a_node_says_where_its_slot_is() -> None:
    assert find_slot(torch.ops.fxsplit.extend.default) == 2
    assert find_slot(torch.ops.fxsplit.recall.default) == find_slot(torch.ops.fxsplit.recall) == 5
    assert find_slot(torch.ops.aten.add.Tensor) is None and find_slot("relu") is None
