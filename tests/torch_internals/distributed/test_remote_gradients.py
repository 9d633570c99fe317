"""Two or three ranks with some parameters each train as one process with all of them: clipping, scaling, averages."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fxsplit.errors import ElsewhereError, InputError, RanksDiffer
from fxsplit.torch_internals.distributed.remote_gradients import OwnGradient, RemoteGradients
from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from tests.support.ranks import ranks

STEPS = 3


class Lars(torch.optim.Optimizer):
    """An optimizer that asks for the norm of each gradient, which is its own matter, and not one of all ranks."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(weight.grad * weight.norm() / weight.grad.norm(), alpha=group["lr"])


OPTIMIZERS: dict[str, Any] = {
    "AdamW fused": lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
    "AdamW foreach": lambda weights: torch.optim.AdamW(weights, lr=0.1, foreach=True),
    "Adam": lambda weights: torch.optim.Adam(weights, lr=0.1),
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, lr=0.01),
    "Adafactor": lambda weights: torch.optim.Adafactor(weights, lr=0.1),
    "Lars": lambda weights: Lars(weights, {"lr": 0.1}),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1),
}


class Gather:
    """Brings numbers from rank to rank."""

    def gather(self, numbers: Tensor, what: str) -> list[Tensor]:
        found = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
        dist.all_gather(found, numbers)
        return found


def build(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5).to(dtype), nn.Linear(5, 3), nn.Linear(3, 2))


def part(model: nn.Module, rank: int, world: int) -> tuple[RemoteGradients, list[Tensor]]:
    """Deal the parameters of a model to the ranks in turn, the first two to rank 1. Returns all weights."""
    named = [(name, weight, 1 if i < 2 else i % world) for i, (name, weight) in enumerate(model.named_parameters())]
    remote_gradients = RemoteGradients(named, Gather(), rank)
    for i, (_, _, owner) in enumerate(named):
        if owner != rank:
            remote_gradients.send_away(i)
    return remote_gradients, [weight for _, weight, _ in named]


def give_gradients(weights: list[Tensor], step: int, factor: float = 1.0, *, without: int = 4) -> None:
    """Give parameters the gradients that a backward would have given them; one gets none."""
    generator = torch.Generator().manual_seed(step)
    for i, weight in enumerate(weights):
        gradient = torch.randn(weight.shape, generator=generator).to(weight.dtype) * factor
        if i != without and not is_remote(weight):
            weight.grad = gradient if weight.grad is None else weight.grad + gradient


def compare(model: nn.Module, whole: nn.Module) -> None:
    """Compare this rank's parameters with the unsplit model's, bit for bit."""
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert is_remote(mine) or torch.equal(mine, other)


def train(rank: int, world: int, dtype: torch.dtype) -> list[str]:
    done = []
    for name, make in OPTIMIZERS.items():
        model, whole = build(dtype), build(dtype)
        held = make(model.parameters())  # made before parameters become remote
        remote_gradients, weights = part(model, rank, world)
        other = make(whole.parameters())
        for step in range(STEPS):
            give_gradients(weights, step)
            give_gradients(list(whole.parameters()), step)
            remote_gradients.share_present()
            assert [w.grad is None for w in weights] == [w.grad is None for w in whole.parameters()]
            for kind in (2.0, float("inf"), 1.0):
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.7, norm_type=kind, foreach=True if step else None)
                assert torch.equal(norm, nn.utils.clip_grad_norm_(whole.parameters(), 0.7, norm_type=kind))
            # All of these are on one rank; the other ranks have no values of them.
            first = nn.utils.clip_grad_norm_(weights[:2], 0.1)
            assert torch.equal(first, nn.utils.clip_grad_norm_(list(whole.parameters())[:2], 0.1))
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            nn.utils.clip_grad_value_(whole.parameters(), 0.05)
            held.step()
            other.step()
            assert all(is_remote(w.grad) == is_remote(w) for w in weights if w.grad is not None)
            compare(model, whole)
            kept = [value for w, state in held.state.items() if is_remote(w) for value in state.values()]
            assert all(is_remote(value) or value.ndim == 0 for value in kept)  # Adagrad begins with sums
            held.zero_grad(set_to_none=step == 1)
            other.zero_grad(set_to_none=step == 1)
        done.append(name)
    return done


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_and_optimizers_are_as_unsplit(dtype: torch.dtype) -> None:
    assert ranks(3, train, dtype) == [list(OPTIMIZERS)] * 3


def scale(rank: int, world: int) -> list[float]:
    model, whole = build(), build()
    remote_gradients, _ = part(model, rank, world)
    pairs = [
        (m, torch.optim.AdamW(m.parameters(), lr=0.1, fused=True), torch.amp.GradScaler("cpu")) for m in (model, whole)
    ]
    found = []
    for step in range(5):
        for of, optimizer, scaler in pairs:
            give_gradients(list(of.parameters()), step, float(scaler.scale(torch.ones(()))))
            # Of the first parameter, which rank 1 has, or of the last.
            bad = {1: 0, 3: -1}.get(step)
            weight = list(of.parameters())[bad or 0]
            if bad is not None and not is_remote(weight):
                weight.grad[0] = float("inf") if step == 1 else float("nan")  # type: ignore[index]
            if of is model:
                remote_gradients.share_present()
            if step != 3:  # without it, step() checks for infinities and NaN
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(of.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        compare(model, whole)
        scales = [scaler.get_scale() for _, _, scaler in pairs]
        assert scales[0] == scales[1]
        found.append(scales[0])
    return found


def test_a_scaler_skips_a_step_on_all_ranks() -> None:
    begin = 2.0**16
    expected = [begin, begin / 2, begin / 2, begin / 4, begin / 4]
    assert ranks(2, scale) == [expected, expected]


def average(rank: int, world: int) -> str:
    model, whole = build(), build()
    remote_gradients, weights = part(model, rank, world)
    kinds: list[Any] = [AveragedModel, lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9))]
    averages = [(kind(model), kind(whole)) for kind in kinds]
    by_hand = [[w.detach().clone() for w in m.parameters()] for m in (model, whole)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, whole)]
    for step in range(STEPS):
        give_gradients(weights, step)
        give_gradients(list(whole.parameters()), step)
        remote_gradients.share_present()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for kept, m in zip(by_hand, (model, whole), strict=True):
            with torch.no_grad():
                for mean, weight in zip(kept, m.parameters(), strict=True):
                    mean.mul_(0.9).add_(weight, alpha=0.1)
        for mine, other in averages:
            mine.update_parameters(model)
            other.update_parameters(whole)
            compare(mine, other)
    assert all(is_remote(a) or torch.equal(a, b) for a, b in zip(*by_hand, strict=True))
    assert any(map(is_remote, averages[0][0].parameters())) and any(map(is_remote, by_hand[0]))
    return "equal"


def test_averages_of_parameters_are_as_unsplit() -> None:
    assert ranks(2, average) == ["equal", "equal"]


def close(rank: int, world: int) -> str:
    """Step with a closure that runs the backward and clips."""
    model, whole = build(), build()
    remote_gradients, _ = part(model, rank, world)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, whole)]
    for m, optimizer in zip((model, whole), optimizers, strict=True):

        def closure(m: nn.Module = m, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            give_gradients(list(m.parameters()), 0)
            if m is model:
                remote_gradients.share_present()
            return nn.utils.clip_grad_norm_(m.parameters(), 0.3)

        for _ in range(2):
            optimizer.step(closure)
    compare(model, whole)
    norms = [[p.grad.norm() for p in m.parameters() if p.grad is not None] for m in (model, whole)]
    assert norms[0] == norms[1] and len(norms[0]) == 7
    return "equal"


def test_closures_and_single_norms() -> None:
    assert ranks(2, close) == ["equal", "equal"]


def refuse(rank: int, world: int) -> list[str]:
    model = build()
    remote_gradients, weights = part(model, rank, world)
    give_gradients(weights, 0)
    remote_gradients.share_present()
    errors = []
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(InputError) as caught:
        optimizer.step(lambda: 0.0)
    errors.append(str(caught.value))
    away = next(w for w in weights if is_remote(w))
    for read in (lambda: away.grad.abs().max(), lambda: away.grad.tolist()):  # type: ignore[union-attr]
        with pytest.raises(ElsewhereError) as told:
            read()
        errors.append(str(told.value))
    with pytest.raises(RanksDiffer) as differ:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=2.0 + rank)
    return [*errors, str(differ.value)]


def test_what_cannot_be_is_refused_by_name() -> None:
    (first, largest, listed, norms), second = ranks(2, refuse)
    assert first == (
        "LBFGS makes one vector of all parameters, and '0.weight' is on rank 1: use an optimizer that steps each "
        "parameter by itself, such as AdamW or SGD"
    )
    assert largest.startswith("the gradient of '0.weight' is on rank 1, and max() needs its values on this rank")
    assert listed.startswith("the gradient of '0.weight' is on rank 1, and tolist() needs")
    assert "rank 0 computes norms of order 2.0, and rank 1 something else" in norms
    assert "rank 1 computes norms of order 3.0, and rank 0" in second[-1] and "'1.weight' is on rank 0" in second[0]


def copy_own(rank: int, world: int) -> str:
    model = build()
    remote_gradients, weights = part(model, rank, world)
    give_gradients(weights, 0)
    remote_gradients.share_present()
    gradient = next(w.grad for w in weights if isinstance(w.grad, OwnGradient))
    assert type(copy.deepcopy(gradient)) is Tensor and type(gradient * 2) is Tensor
    again = pickle.loads(pickle.dumps(gradient))
    assert type(again) is Tensor and torch.equal(again, gradient) and torch.equal(copy.deepcopy(gradient), gradient)
    return "plain"


def test_gradients_of_this_rank_are_copied_as_plain_tensors() -> None:
    assert ranks(2, copy_own) == ["plain", "plain"]


NORMS: dict[str, Any] = {
    "norm(2)": lambda g: g.norm(2),
    "norm()": lambda g: g.norm(),
    "norm fro": lambda g: g.norm("fro"),
    "torch.norm 2": lambda g: torch.norm(g, 2),
    "torch.norm p=1": lambda g: torch.norm(g, p=1),
    "torch.norm inf": lambda g: torch.norm(g, float("inf"), dtype=torch.float64),
    "stack": lambda g: torch.norm(torch.stack([torch.norm(g, 2)]), 2),
    "keepdim": lambda g: torch.linalg.vector_norm(g, 3, keepdim=True),
    "vector_norm dtype": lambda g: torch.linalg.vector_norm(g, dtype=torch.float64),
    "linalg.norm": torch.linalg.norm,
    "linalg.norm fro": lambda g: torch.linalg.norm(g, "fro"),
    "matrix_norm": torch.linalg.matrix_norm,
    "matrix_norm by name": lambda g: torch.linalg.matrix_norm(input=g, ord="fro", dim=(-2, -1), keepdim=True),
    "linalg.norm by name": lambda g: torch.linalg.norm(input=g, ord=None, dim=(0, 1), dtype=torch.float64),
    "vector_norm by name": lambda g: torch.linalg.vector_norm(x=g, ord=1),
    "vector_norm over all": lambda g: torch.linalg.vector_norm(g, 2, (-1, 0), True),
    "torch.norm by name": lambda g: torch.norm(input=g, p="fro", dim=(0, 1)),
    "foreach": lambda g: torch._foreach_norm([g])[0],
    "foreach by name": lambda g: torch._foreach_norm(self=[g], ord=1, dtype=torch.float64)[0],
    "total": lambda g: nn.utils.get_total_norm(tensors=[g], norm_type=3.0, error_if_nonfinite=True),
    "total of one": lambda g: nn.utils.get_total_norm(g, float("inf"), foreach=False),
}
OTHER_NORMS: dict[str, Any] = {
    "largest singular value": lambda g: torch.linalg.norm(g, 2),
    "largest column": lambda g: torch.linalg.norm(g, 1),
    "largest row": lambda g: torch.linalg.norm(g, float("inf")),
    "nuclear": lambda g: torch.norm(g, "nuc"),
    "nuclear of linalg": lambda g: torch.linalg.norm(g, "nuc"),
    "of rows": lambda g: g.norm(2, dim=1),
    "of rows, kept": lambda g: torch.linalg.vector_norm(g, dim=0, keepdim=True),
    "matrix_norm 2": lambda g: torch.linalg.matrix_norm(g, 2),
    "matrix_norm nuc": lambda g: torch.linalg.matrix_norm(input=g, ord="nuc"),
    "rows of norm one": lambda g: F.normalize(g),
    "out=": lambda g: torch.linalg.vector_norm(g, out=torch.empty(())),
}
WRONG_NORMS: dict[str, tuple[Any, type[Exception]]] = {
    "narrower": (lambda g: torch.norm(g, 2, dtype=torch.float16), RuntimeError),
    "narrower, listed": (lambda g: torch._foreach_norm([g], 2, torch.float16), RuntimeError),
    "of a third dimension": (lambda g: torch.linalg.vector_norm(g, 2, 2), IndexError),
    "twice": (lambda g: torch.linalg.vector_norm(g, 2, (0, 0)), RuntimeError),
    "by no such name": (lambda g: g.norm(order=2), TypeError),
}
"""Arguments that torch refuses, and the errors that it raises."""


def take_norms(rank: int, world: int) -> int:
    model, whole = build(), build()
    remote_gradients, weights = part(model, rank, world)
    give_gradients(weights, 0)
    give_gradients(list(whole.parameters()), 0)
    remote_gradients.share_present()
    checked = 0
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        if other.grad is None or other.ndim != 2:
            continue
        for name, norm in NORMS.items():
            found, expected = norm(mine.grad), norm(other.grad)
            assert found.dtype == expected.dtype and found.shape == expected.shape, name
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0, msg=name)
            checked += 1
        for name, norm in OTHER_NORMS.items():
            # On all ranks: otherwise one rank would wait for the other ranks for ever.
            with pytest.raises((InputError, ElsewhereError), match=r"the gradient of '\d.weight'"):
                norm(mine.grad)
                raise AssertionError(name)
            checked += 1
        for name, (norm, error) in WRONG_NORMS.items():
            for gradient in (mine.grad, other.grad):
                with pytest.raises(error):
                    norm(gradient)
                    raise AssertionError(name)
            checked += 1
    return checked


def test_norms_are_those_of_torch_or_are_refused_on_all_ranks() -> None:
    found = ranks(2, take_norms)
    assert found[0] == found[1] == 3 * (len(NORMS) + len(OTHER_NORMS) + len(WRONG_NORMS))


def clip_with_a_norm(rank: int, world: int) -> list[float]:
    norms = []
    model, whole = build(), build()
    remote_gradients, weights = part(model, rank, world)
    for step, (foreach, named) in enumerate([(None, True), (False, False), (True, True)]):
        give_gradients(weights, step)
        give_gradients(list(whole.parameters()), step)
        remote_gradients.share_present()
        for m in (model, whole):
            total = nn.utils.get_total_norm([p.grad for p in m.parameters() if p.grad is not None], foreach=foreach)
            if named:
                nn.utils.clip_grads_with_norm_(parameters=m.parameters(), max_norm=0.7, total_norm=total)
            else:
                nn.utils.clip_grads_with_norm_(list(m.parameters()), 0.7, total, foreach)
            norms.append(float(total))
        for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
            if not is_remote(mine) and mine.grad is not None:
                torch.testing.assert_close(mine.grad.as_subclass(Tensor), other.grad)
                mine.grad = None
            other.grad = None
    return norms


def test_gradients_are_clipped_with_a_norm() -> None:
    for norms in ranks(2, clip_with_a_norm):
        assert norms[::2] == norms[1::2] and len(norms) == 6


SPARSE_NORMS: dict[str, Any] = {
    "method": lambda g: g.norm(),
    "of order 1": lambda g: g.norm(1),
    "largest": lambda g: torch.norm(g, float("inf")),
    "function": lambda g: torch.norm(g),
    "by name": lambda g: g.norm("fro"),
}


def take_norms_of_sparse(rank: int, world: int) -> int:
    model, whole = (nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)) for _ in range(2))
    model.load_state_dict(whole.state_dict())
    remote_gradients, _ = part(model, rank, world)
    whole(torch.tensor([1, 2, 2, 7])).square().sum().backward()
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        if not is_remote(mine) and other.grad is not None:
            mine.grad = other.grad.clone()
    remote_gradients.share_present()
    gradient, expected = next(model.parameters()).grad, next(whole.parameters()).grad
    assert gradient is not None and expected is not None and expected.is_sparse
    for name, norm in SPARSE_NORMS.items():
        torch.testing.assert_close(norm(gradient), norm(expected), msg=name)
    for name, norm in OTHER_NORMS.items():
        # torch has this one of no sparse tensor.
        if name != "rows of norm one":
            with pytest.raises((InputError, ElsewhereError), match=r"the gradient of '0.weight'"):
                norm(gradient)
                raise AssertionError(name)
    return len(SPARSE_NORMS)


def test_norms_of_a_sparse_gradient_are_those_of_torch() -> None:
    """The rank that has it refused its norms, and the other rank waited."""
    assert ranks(2, take_norms_of_sparse) == [len(SPARSE_NORMS)] * 2
