"""Each rank has only the weights of its stages, and the loop around the pipeline is the unsplit model's."""

from __future__ import annotations

import copy
import gc
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxsplit
from fxsplit import IR, Pins
from fxsplit.errors import ElsewhereError, InputError, RankError, RanksDiffer
from fxsplit.ir.chain import parse_chain
from fxsplit.passes import PASSES
from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from tests.support.checkpoints import X, Y, build, compare, make_adamw
from tests.support.models import FAST, Mlp
from tests.support.ranks import ranks
from tests.support.times import state_times

OPTIONS: dict[str, Any] = {"passes": FAST, "n_microbatches": 4, "loss_fn": F.cross_entropy, "example_inputs": X}


def cut_both(n: int, **options: Any) -> tuple[fxsplit.Pipeline, fxsplit.Pipeline]:
    """Return a pipeline over ranks, and one over threads with its plan."""
    (model, _), (other, _) = build(), build()
    pipe = fxsplit.compile(model, "world", **{**OPTIONS, **options})
    return pipe, fxsplit.compile(other, ["cpu"] * n, **{**OPTIONS, **options}, costs=pipe.costs)


def list_kept(model: nn.Module) -> list[str]:
    return [name for name, weight in (*model.named_parameters(), *model.named_buffers()) if not is_remote(weight)]


def assert_same_weights(mine: nn.Module, other: nn.Module) -> int:
    """Compare this rank's part of a model with the whole. Returns the number of weights compared."""
    expected = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    for name in list_kept(mine):
        found = {**dict(mine.named_parameters()), **dict(mine.named_buffers())}[name]
        assert torch.equal(found, expected[name]), name
    return len(list_kept(mine))


def run_loop(pipe: fxsplit.Pipeline, kind: str) -> list[float]:
    """Train as any script does: scaler, clipping, averages of the parameters; return all figures that it sees."""
    optimizer = make_adamw(pipe)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    averaged = AveragedModel(pipe.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    by_hand = [w.detach().clone() for w in pipe.parameters()]
    figures = []
    for number in range(3):
        torch.manual_seed(number)
        if kind == "step":
            loss = pipe.step(X, target=Y)
            norm = nn.utils.clip_grad_norm_(pipe.parameters(), 0.5)
            optimizer.step()
        else:
            loss = F.cross_entropy(pipe(X), Y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(pipe.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        figures += [float(loss.detach()), float(norm), scaler.get_scale()]
        figures += [float(w.grad.norm()) for w in pipe.parameters() if w.grad is not None]
        optimizer.zero_grad()
        averaged.update_parameters(pipe.model)
        with torch.no_grad():
            for mean, weight in zip(by_hand, pipe.parameters(), strict=True):
                mean.mul_(0.9).add_(weight, alpha=0.1)
    own = {id(w) for w in pipe.parameters() if not is_remote(w)}
    assert [is_remote(mean) for mean in by_hand] == [id(w) not in own for w in pipe.parameters()]
    return figures


def train(rank: int, n: int, kind: str) -> int:
    pipe, other = cut_both(n)
    with pipe, other:
        # Clipping adds norms of both ways in the same order: figures are equal to the last bit.
        assert run_loop(pipe, kind) == run_loop(other, kind)
        kept = assert_same_weights(pipe.model, other.model)
        pipe.eval(), other.eval()
        with torch.no_grad():
            assert torch.equal(pipe(X), other(X)) and torch.equal(pipe(X[:13]), other(X[:13]))
        pipe.train(), other.train()
        assert assert_same_weights(pipe.model, other.model) == kept
        compare(dict(pipe.state_dict()), dict(other.state_dict()))
    return kept


@pytest.mark.parametrize("kind", ["step", "backward"])
def test_the_loop_is_that_of_the_unsplit_model(kind: str) -> None:
    kept = ranks(3, train, kind)
    # Eight parameters and four buffers, each on one rank. A stage without any may be a plan's best.
    assert sum(kept) == 12 and max(kept) < 12


def pin_weights(ir: IR) -> IR:
    return Pins.add(ir, {"0": 0, "1": 1, "2": 1})


def train_without_weights(rank: int, n: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Sigmoid())
    whole, x = copy.deepcopy(model), torch.randn(8, 6)
    chain = parse_chain(FAST, PASSES).before("augment", pin_weights)
    with fxsplit.compile(model, "world", passes=chain, n_microbatches=4, example_inputs=x) as pipe:
        pipe(x).square().sum().backward()
    whole(x).square().sum().backward()
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        if not is_remote(mine):
            torch.testing.assert_close(mine.grad, other.grad)
    return list_kept(model)


def test_a_rank_without_weights_takes_part_in_a_backward_of_the_callers() -> None:
    assert ranks(2, train_without_weights) == [["0.weight", "0.bias"], []]


def hold(rank: int, n: int) -> tuple[int, str]:
    """Compile a model with large weights, and measure their memory."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    early = torch.optim.AdamW(model.parameters())
    objects = [*model.parameters()]
    x = torch.randn(8, 512)
    pipe = fxsplit.compile(model, "world", **{**OPTIONS, "loss_fn": F.mse_loss, "example_inputs": x})
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert early.param_groups[0]["params"][0] is objects[0]
    away = next(w for w in objects if is_remote(w))
    with pytest.raises(ElsewhereError) as caught:
        away.sum()
    with pytest.raises(ElsewhereError):
        torch.save(model.state_dict(), io.BytesIO())
    pipe.step(x, target=x)
    early.step()
    gc.collect()
    held = {w.untyped_storage().data_ptr(): w.nbytes for w in objects if not is_remote(w)}
    assert {w.device for w in objects} == {torch.device("cpu")}
    return sum(held.values()), str(caught.value)


def test_a_rank_holds_its_stages_alone_and_says_who_has_the_others() -> None:
    (first, text), (second, other) = ranks(2, hold)
    assert first + second == 4 * 4 * (512 * 512 + 512)
    assert re.fullmatch(
        r"'\d.weight' is on rank 1, and sum\(\) needs .* rank: pipe.state_dict\(\) gathers all weights", text
    )
    assert other.startswith("'0.weight' is on rank 0, and sum()")


def load(rank: int, n: int, folder: Path) -> str:
    pipe, other = cut_both(n)
    fresh, _ = build(seed=9)
    with pipe, other:
        before = [*pipe.parameters()]
        kept = list_kept(pipe.model)
        pipe.load_state_dict(fresh.state_dict())
        assert all(a is b for a, b in zip(pipe.parameters(), before, strict=True)) and list_kept(pipe.model) == kept
        compare(dict(pipe.state_dict()), dict(fresh.state_dict()))
        other.load_state_dict(pipe.state_dict())
        for seed in (1, 2):
            found = []
            for one in (pipe, other):
                torch.manual_seed(seed)
                found.append(float(one.step(X, target=Y)))
            assert found[0] == found[1]
        assert_same_weights(pipe.model, other.model)
        pipe.save_weights(folder / "one")
        pipe.save_weights(folder / "several", max_shard_bytes=300)
        if rank == 0:
            found_in = load_file(folder / "one" / "model.safetensors")
            assert all(torch.equal(value, other.state_dict()[name]) for name, value in found_in.items())
            (folder / "file").write_text("")
        again, _ = build(seed=8)
        third = fxsplit.compile(again, "world", **OPTIONS, costs=pipe.costs, weights=folder / "several")
        compare(dict(third.state_dict()), dict(other.state_dict()))
        with pytest.raises(InputError if rank == 0 else RankError, match="is a file: give the path of a folder"):
            pipe.save_weights(folder / "file")
        pipe.half()
        assert {w.dtype for w in pipe.parameters()} == {torch.float16}
        pipe.float()
        assert pipe.state_dict(keep_vars=True)["words.weight"] is dict(pipe.named_parameters())["words.weight"]
    return "loaded"


def test_weights_are_loaded_gathered_and_saved(tmp_path: Path) -> None:
    assert ranks(2, load, tmp_path) == ["loaded"] * 2


def assign(rank: int, n: int) -> list[str]:
    """Load values as new parameter objects; each rank keeps its own."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 8), torch.randn(12, 3)
    model, other = Mlp(4), Mlp(4)
    pipe = fxsplit.compile(model, "world", **{**OPTIONS, "loss_fn": F.mse_loss, "example_inputs": x})
    kept, before = list_kept(model), [*model.parameters()]
    pipe.load_state_dict(other.state_dict(), assign=True)
    assert list_kept(model) == kept and not any(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert torch.allclose(pipe.step(x, target=y), F.mse_loss(other(x), y))
    assert [w.grad is None for w in model.parameters()] == [False] * len(before)
    pipe.close()
    return kept


def test_weights_are_loaded_as_other_parameters() -> None:
    first, second = ranks(2, assign)
    assert first and second and not {*first} & {*second}


def part_ways(rank: int, n: int) -> list[str]:
    """Do other things on other ranks."""
    pipe, _ = cut_both(n)
    texts = []
    pipe.step(X, target=Y)
    for number in range(2):
        with pytest.raises(RanksDiffer) as caught:
            if rank == number:
                pipe.state_dict()
            elif number == 0:
                pipe.step(X, target=Y)
            else:
                nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
        texts.append(str(caught.value))
    assert nn.utils.clip_grad_norm_(pipe.parameters(), 1.0) > 0
    pipe.close()
    return texts


def test_ranks_that_part_ways_are_told() -> None:
    texts, others = ranks(2, part_ways)
    assert texts == others
    assert "rank 1 calls step number 1 of pipeline 0; rank 0 calls state_dict() of pipeline 0" in texts[0]
    assert "rank 1 calls state_dict() of pipeline 0; rank 0 calls norms of order 2.0 of pipeline 0" in texts[1]


def change_plans(rank: int, n: int) -> str:
    """Compile for inference first. Training gets another plan, and weights move between ranks."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 8), torch.randn(12, 3)
    model, whole = Mlp(4), Mlp(4)
    whole.load_state_dict(model.state_dict())
    options: dict[str, Any] = {"passes": FAST, "n_microbatches": 4, "loss_fn": F.mse_loss}
    pipe = fxsplit.compile(model.eval(), "world", **options)
    with torch.no_grad(), pipe:
        assert torch.allclose(pipe(x), whole.eval()(x))
        first = list_kept(model)
        with torch.enable_grad():
            pipe.train()
            loss = pipe.step(x, target=y)
            F.mse_loss(whole.train()(x), y).backward()
        assert torch.allclose(loss, F.mse_loss(whole(x), y))
        for name, weight in model.named_parameters():
            if not is_remote(weight):
                torch.testing.assert_close(weight.grad, dict(whole.named_parameters())[name].grad)
        state = pipe.state_dict()
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in state.items())
    assert first
    return "trained"


def test_weights_go_where_another_plan_wants_them() -> None:
    assert ranks(2, change_plans) == ["trained"] * 2


def compile_twice(rank: int, n: int, same: bool) -> list[str]:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))).double(), torch.randn(8, 4).double()
    whole = copy.deepcopy(model)
    options: dict[str, Any] = {"example_inputs": x, "n_microbatches": 2, "loss_fn": F.mse_loss}
    state_times(_0=30.0)
    first = fxsplit.compile(model, "world", **options)
    state_times()
    with first:
        costs: dict[str, Any] = {"costs": first.costs} if same else {}
        try:
            second = fxsplit.compile(model, "world", **options, **costs)
        except InputError as error:
            # The first one goes on.
            torch.testing.assert_close(first.step(x, target=x), F.mse_loss(whole(x), x).detach())
            return [str(error)]
        with second:
            for pipe in (second, first, second):
                model.zero_grad()
                whole.zero_grad()
                wanted = F.mse_loss(whole(x), x)
                wanted.backward()
                torch.testing.assert_close(pipe.step(x, target=x), wanted.detach())
                # A gradient that was one of the other pipeline waited for ranks that came for this one's.
                for times, further in ((1, second), (2, first), (3, None)):
                    for weight, other in zip(model.parameters(), whole.parameters(), strict=True):
                        assert weight.grad is not None and other.grad is not None
                        torch.testing.assert_close(weight.grad.norm(), times * other.grad.norm())
                    if further is not None:
                        further.step(x, target=x)
    return []


def test_a_second_pipeline_with_other_places_is_refused_on_all_ranks() -> None:
    """It failed in its first step, in the middle of a stage."""
    for (said,) in ranks(2, compile_twice, False):
        assert re.match(r"'\d.(weight|bias)' is on another rank than rank 0, where the plan", said) and "costs=" in said


def test_a_second_pipeline_with_the_plan_of_the_first_runs() -> None:
    assert ranks(2, compile_twice, True) == [[], []]
