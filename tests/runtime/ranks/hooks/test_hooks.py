"""Hooks over ranks: some are exact, and those that compress lose nothing over many steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxsplit.errors import InputError
from fxsplit.runtime.ranks.gradients.reducer import Reducer
from fxsplit.runtime.ranks.hooks.buckets import GradientOffer, fill_buckets
from fxsplit.runtime.ranks.hooks.hooks import NAMED, HookChoice
from fxsplit.runtime.ranks.hooks.sketch import Hashes
from fxsplit.runtime.ranks.hooks.topk import merge
from tests.support.ranks import ranks

SHAPES = [(7, 5), (5,), (40, 3), (2, 3, 4)]


def make_parameters() -> list[Tensor]:
    return [torch.zeros(shape, dtype=torch.float64).requires_grad_() for shape in SHAPES]


def draw_gradients(rank: int, step: int, parameters: list[Tensor]) -> list[GradientOffer]:
    """Return gradients of a few large entries and many small ones; each rank lacks some in some steps."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    found = []
    for number, p in enumerate(parameters):
        gradient = torch.randn(p.shape, dtype=torch.float64, generator=generator) ** 3
        lacks = number == 1 and step % 3 == 0 and rank != 0
        nowhere = number == 3 and step % 5 == 0
        found.append(GradientOffer(p, None if lacks or nowhere else gradient))
    return found


def lose_nothing(rank: int, n: int, kind: str) -> tuple[float, float, str]:
    """Return the errors of the accounting over 45 steps (applied plus kept, minus given), and between ranks."""
    parameters = make_parameters()
    reducer = Reducer(HookChoice(kind + "{share=0.05}").make(), bucket_bytes=500)
    residuals = reducer.residuals
    assert residuals is not None
    applied, given = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    for step in range(45):
        shares = draw_gradients(rank, step, parameters)
        if step % 7 == 0:
            # A failed step leaves no trace.
            reducer.finish(draw_gradients(rank, step + 1000, parameters))
            reducer.settle(kept=False)
        means = reducer.finish(shares)
        reducer.settle(kept=True)
        for i, (p, g) in enumerate(shares):
            given[i] += 0.0 if g is None else g
            applied[i] += n * means.get(p, torch.zeros_like(p))
            # If no rank has a gradient there is none, and earlier errors wait.
            assert (p in means) or (i == 3 and step % 5 == 0)
    left = [residuals.get(p) for p in parameters]
    alike = torch.cat([a.flatten() for a in applied]).detach()
    first = alike.clone()
    dist.broadcast(first, src=0)
    worst = 0.0
    for a, g, rest in zip(applied, given, left, strict=True):
        both = torch.stack([g, rest]).detach()
        dist.all_reduce(both)
        worst = max(worst, float((a.detach() + both[1] - both[0]).abs().max()))
    return worst, float((alike - first).abs().max()), str(reducer.traffic)


@pytest.mark.parametrize("kind", ["topk", "sketch"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_what_is_applied_and_what_is_left_are_all_gradients(n: int, kind: str) -> None:
    found = ranks(n, lose_nothing, kind)
    for worst, apart, told in found:
        assert worst < 1e-9 and apart == 0.0, "nothing is lost, and all ranks apply the same"
        assert "% saved)" in told


def train_with(rank: int, n: int, name: str, rows: int) -> list[float]:
    """Return the loss over all rows after each of 100 steps on uneven shares of a small problem."""
    torch.manual_seed(1)
    x, weights = torch.randn(rows, 20, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    y = x @ weights
    model = nn.Linear(20, 1).double()
    own = slice(0, 2 * rows // 3) if rank == 0 else slice(2 * rows // 3 + (rank - 1), None, max(1, n - 1))
    option: Any = name
    if name == "user's":
        option = None, add_slowly
    if name in ("topk", "sketch"):
        option = name + "{share=0.2}"
    reducer = Reducer(HookChoice(option).make(), bucket_bytes=64)
    losses = []
    for _ in range(100):
        model.zero_grad()
        nn.functional.mse_loss(model(x[own]), y[own]).backward()
        shares = [GradientOffer(p, p.grad) for p in model.parameters()]
        means = reducer.finish(shares, len(x[own]) * n / rows)
        reducer.settle(kept=True)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.05 * means[p])
        losses.append(float(nn.functional.mse_loss(model(x), y).detach()))
    return losses


def add_slowly(state: Any, bucket: Any) -> Any:
    """A hook of a user's: the mean, in another way than torch's."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())


@pytest.mark.parametrize("name", [*NAMED, "user's"])
def test_training_on_uneven_shares_comes_to_the_whole_batchs_weights(name: str) -> None:
    """Exact for means. Compression comes as near in the end, also PowerSGD after its first steps in many buckets."""
    rows = 24
    torch.manual_seed(1)
    x, weights = torch.randn(rows, 20, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    model = nn.Linear(20, 1).double()
    whole = []
    for _ in range(100):
        model.zero_grad()
        nn.functional.mse_loss(model(x), x @ weights).backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(0.05 * p.grad)
        whole.append(float(nn.functional.mse_loss(model(x), x @ weights).detach()))
    found = ranks(2, train_with, name, rows)
    assert found[0] == found[1]
    if name in ("allreduce", "user's"):
        assert found[0] == pytest.approx(whole, rel=1e-12)
    else:
        assert found[0][-1] < 0.1 * found[0][0], "it learns"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("zip", "gradient_hook='zip': give one of allreduce, fp16, bf16, powersgd, topk, sketch, with options as in"),
        (3, "gradient_hook=3: give one of"),
        ((None,), "give one of"),
        ((None, 5), "give one of"),
        ("topk{shar=0.1}", r"has 'shar=0.1', and topk takes share= float"),
        ("fp16{share=0.1}", "and fp16 takes no options"),
        ("topk{share=lots}", "has 'share=lots', and topk takes share= float"),
        ("topk{share=0}", "share=0.0: give the share"),
        ("sketch{rows=4}", r"rows=4, cells=4.0: give an odd number"),
        ("powersgd{start=1}", "rank=1, start=1: give a rank of at least 1, and a start from 2 on"),
    ],
)
def test_a_hook_that_there_is_not_is_refused_by_name(option: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        HookChoice(option)


def test_a_hook_is_read_with_its_options() -> None:
    assert HookChoice(None).make().function is HookChoice("allreduce").make().function
    made = HookChoice("sketch{share=0.5, rows=3, cells=2}").make().state
    assert (made.share, made.rows, made.cells) == (0.5, 3, 2.0)
    assert HookChoice("powersgd{rank=4}").make().state.matrix_approximation_rank == 4
    # Each group of ranks has its own state; a user's state can serve only one group.
    choice = HookChoice("topk")
    assert choice.make().state is not choice.make().state
    own = HookChoice((made, add_slowly))
    assert own.make().state is made and own.text == "add_slowly"
    own.check_groups(1)
    with pytest.raises(InputError, match=r"in 2 groups of ranks, .*: give the name of a hook, or a state of None"):
        own.check_groups(2)


def test_buckets_are_cut_by_bytes_dtypes_and_refuse_sparse_gradients() -> None:
    a, b, c = torch.zeros(10), torch.zeros(10), torch.zeros(3, dtype=torch.float64)
    made = fill_buckets(
        [GradientOffer(a, torch.ones(10)), GradientOffer(b, None), GradientOffer(c, torch.ones(3).double())], 60
    )
    assert [len(one.parameters()) for one in made] == [1, 1, 1] and [m.is_last() for m in made] == [False, False, True]
    made = fill_buckets(
        [GradientOffer(a, torch.ones(10)), GradientOffer(b, None), GradientOffer(c, torch.ones(3).double())]
    )
    assert [one.buffer().numel() for one in made] == [20, 3] and [one.index() for one in made] == [0, 1]
    assert made[0].gradients()[1].shape == (10,) and float(made[0].buffer().sum()) == 10.0
    with pytest.raises(InputError, match=r"shape \[2, 2\] is sparse_coo, which no hook takes"):
        fill_buckets([GradientOffer(torch.zeros(2, 2), torch.eye(2).to_sparse())])
    assert fill_buckets([]) == []


def test_a_merge_keeps_the_largest_sums_and_drops_the_rest() -> None:
    mine = torch.tensor([1, 4], dtype=torch.int32), torch.tensor([3.0, -1.0])
    others = torch.tensor([4, 7], dtype=torch.int32), torch.tensor([-2.5, 2.0])
    places, values, (dropped, rest) = merge(mine, others, 2)
    assert dict(zip(places.tolist(), values.tolist(), strict=True)) == {4: -3.5, 1: 3.0}
    assert (dropped.tolist(), rest.tolist()) == ([7], [2.0])


def test_sketches_add_up_and_tell_large_entries() -> None:
    torch.manual_seed(0)
    hashes = Hashes(5, 400, torch.device("cpu"))
    a, b = torch.randn(5000) * 0.01, torch.randn(5000) * 0.01
    a[17], b[4000] = 5.0, -7.0
    assert torch.allclose(hashes.sketch(a) + hashes.sketch(b), hashes.sketch(a + b), atol=1e-5)
    found = hashes.estimate(hashes.sketch(a + b), 5000)
    assert set(found.abs().topk(2).indices.tolist()) == {17, 4000}
    assert float((found - (a + b)).abs().max()) < 0.5
