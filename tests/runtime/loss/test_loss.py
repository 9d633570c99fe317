"""Losses of microbatches: weighed by their rows, with parameters and draws of their own."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fxsplit
from fxsplit.errors import InputError, StageError
from fxsplit.ir.facts.capture import counts
from fxsplit.runtime.loss import loss as loss_module
from fxsplit.runtime.loss.loss import (
    BatchLoss,
    find_own_loss,
    find_reduction,
    find_weights,
    sum_squares,
    sum_weighted,
    take_model_loss,
)
from fxsplit.runtime.loss.meaning import LossMeaning
from fxsplit.runtime.microbatches import Targets
from fxsplit.runtime.program import Batch
from tests.support.models import FAST, Mlp

mse = F.mse_loss


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


def test_a_loss_without_a_graph_is_refused() -> None:
    """It would be wrong if step() trained nothing without a word."""
    for loss_fn, frozen in ((lambda o, t: mse(o.detach(), t), False), (mse, True)):
        model = Mlp().requires_grad_(not frozen)
        with (
            fxsplit.compile(model, 2, loss_fn=loss_fn, passes=FAST) as pipe,
            pytest.raises(InputError, match="does not depend on anything that wants a gradient"),
        ):
            pipe.step(vectors(), target=torch.zeros(8, 3))


def blow_up(outputs: Tensor, target: Tensor) -> Tensor:
    raise KeyError("no such class")


def test_a_loss_that_raises_is_named_with_its_line() -> None:
    """Once the message blamed nodes of the last stage, which had no part in it."""
    line = blow_up.__code__.co_firstlineno + 1
    for loss_fn, name in (
        (blow_up, f"loss_fn 'blow_up' from File \"{__file__}\", line {line}, microbatch 0 after stage 1 of 2"),
        (partial(blow_up), "loss_fn 'blow_up'"),
        (F.nll_loss, "loss_fn 'nll_loss', microbatch 0 after stage 1 of 2"),
    ):
        with fxsplit.compile(Mlp(), 2, loss_fn=loss_fn, passes=FAST) as pipe, pytest.raises(Exception) as caught:
            pipe.step(vectors(), target=torch.full((8,), 9))
        assert isinstance(caught.value, StageError) and f"in the loss of {name}" in str(caught.value)
        assert "node" not in str(caught.value) and isinstance(caught.value, (KeyError, IndexError))


def test_reduction_bound_by_partial() -> None:
    """Once only modules were searched for a reduction, so a sum would be weighted as a mean."""
    model = Mlp()
    x, y = vectors(7), torch.randint(0, 3, (7,))
    loss_fn = partial(F.cross_entropy, reduction="sum")
    with fxsplit.compile(model, 2, n_microbatches=3, loss_fn=loss_fn, passes=FAST) as pipe:
        torch.testing.assert_close(pipe.step(x, target=y), loss_fn(model(x), y).detach())


class WeightedLoss(nn.Module):
    """A loss with a parameter of its own, and a penalty on one of the model's."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.penalised = [weight]

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return mse(outputs, target) * self.scale + 0.1 * self.penalised[0].square().mean()


def test_the_parameters_of_a_loss_are_trained_once() -> None:
    model = Mlp()
    loss_fn = WeightedLoss(model.get_parameter("layers.0.weight"))
    unsplit, calls = copy.deepcopy(model), []
    other = WeightedLoss(unsplit.get_parameter("layers.0.weight"))
    x, y = vectors(), torch.randn(8, 3)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=4, loss_fn=loss_fn, passes=FAST) as pipe:
        loss_fn.scale.register_hook(lambda g: calls.append(float(g)))
        assert pipe.step(x, target=y) == pytest.approx(other(unsplit(x), y).item(), rel=1e-5)
        other(unsplit(x), y).backward()
        torch.testing.assert_close(loss_fn.scale.grad, other.scale.grad)
        for mine, its in zip(model.parameters(), unsplit.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad)
        with pytest.raises(StageError):
            pipe.step(x, target=torch.full((8, 4), 1.0))
        torch.testing.assert_close(loss_fn.scale.grad, other.scale.grad)
        assert other.scale.grad is not None
        assert calls == [pytest.approx(other.scale.grad.item())], "once, on the sum"


def test_a_loss_that_draws_is_reproducible() -> None:
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.5))]
    model = nn.Sequential(*layers)
    x, y = torch.randn(256, 32), torch.randn(256, 32)

    def noisy(outputs: Tensor, target: Tensor) -> Tensor:
        return mse(outputs, target + torch.randn_like(target))

    found = set()
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=32, loss_fn=noisy, passes=FAST) as pipe:
        for _ in range(5):
            torch.manual_seed(1)
            found.add(float(pipe.step(x, target=y)))
    assert len(found) == 1


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6)))


def mean_square(outputs: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(outputs, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_uneven_microbatches_weigh_by_their_rows(dtype: torch.dtype) -> None:
    model = deep().to(dtype)
    x, y = torch.randn(7, 8, dtype=dtype), torch.randn(7, 8, dtype=dtype)
    alone, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    expected = F.mse_loss(alone(x), y)
    expected.backward()
    with fxsplit.compile(model, 2, loss_fn=mean_square, n_microbatches=3, passes=FAST) as pipe:
        found = pipe.step(x, target=y)
    assert found.dtype == dtype and not found.requires_grad
    torch.testing.assert_close(found, expected.detach())
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())
    if dtype is not torch.bfloat16:
        tolerances = {torch.float32: 1e-5, torch.float64: 1e-12}
        torch.testing.assert_close(join_gradients(model), join_gradients(alone), rtol=1e-6, atol=tolerances[dtype])
        return
    # Sums of three rows round differently from sums of seven, and kernels differ by release: compare both with the
    # result in double precision.
    F.mse_loss(exact(x.double()), y.double()).backward()
    true = join_gradients(exact)
    error, of_alone = (float((join_gradients(one) - true).norm() / true.norm()) for one in (model, alone))
    assert error < 2 * of_alone + torch.finfo(dtype).eps


def join_gradients(model: nn.Module) -> Tensor:
    """Return the gradients of all parameters in one vector of float64."""
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def test_a_loss_that_is_a_parameter_itself() -> None:
    """Its gradient is the weight it has in the batch; nothing else gets one."""
    model = deep()
    extra = nn.Parameter(torch.tensor(3.0))
    with fxsplit.compile(model, 2, loss_fn=lambda outputs, target: extra, n_microbatches=4, passes=FAST) as pipe:
        loss = pipe.step(torch.randn(8, 8), target=torch.randn(8, 8))
    assert float(loss) == 3.0 and float(extra.grad) == 1.0  # type: ignore[arg-type]
    assert all(p.grad is None for p in model.parameters())


def number(value: float) -> Tensor:
    return torch.tensor(value, requires_grad=True)


@pytest.mark.parametrize(
    ("outputs", "index"),
    [
        (number(2.0), None),
        ((number(2.0), 1), 0),
        ((number(2.0), number(3.0)), 0),
        ((torch.ones(2), number(2.0)), 1),
        ([number(2.0)], 0),
        ({"loss": number(2.0)}, "loss"),
    ],
)
def test_a_model_may_return_its_loss(outputs: Any, index: Any) -> None:
    expected = outputs if index is None else outputs[index]
    assert find_own_loss(outputs) is expected and take_model_loss(outputs) is expected


def test_a_loss_may_be_an_attribute() -> None:
    outputs = SimpleNamespace(loss=number(1.0))
    assert find_own_loss(outputs) is outputs.loss


def test_a_named_loss_may_have_one_element() -> None:
    """Hugging Face divides by `num_items_in_batch`, which may be a tensor of one element."""
    for outputs in ({"loss": torch.ones(1)}, SimpleNamespace(loss=torch.ones(1, 1))):
        assert take_model_loss(outputs).shape == ()


@pytest.mark.parametrize(
    "outputs",
    [
        torch.ones(1),
        (torch.ones(1),),
        torch.ones(2),
        torch.tensor(1),
        {"other": number(1.0)},
        (),
        "text",
        [3.0],
        (torch.ones(2), None),
        (torch.ones(2), torch.ones(2), number(3.0)),
    ],
)
def test_what_is_no_loss(outputs: Any) -> None:
    assert find_own_loss(outputs) is None
    with pytest.raises(InputError, match="the model returned none"):
        take_model_loss(outputs)


def test_squares_of_all_float_outputs() -> None:
    assert float(sum_squares({"a": torch.tensor([1.0, 2.0]), "b": [torch.tensor(3), torch.tensor(4.0)]})) == 21.0
    assert find_reduction(sum_squares) == "sum"


def test_reductions() -> None:
    assert find_reduction(F.mse_loss) is None and find_reduction(nn.MSELoss()) == "mean"
    assert find_reduction(nn.MSELoss(reduction="sum")) == "sum"
    assert find_reduction(partial(F.mse_loss, reduction="none")) == "none"
    with pytest.raises(InputError, match="reduction='none'"):
        BatchLoss(nn.MSELoss(reduction="none"), None, [1])


def weights_of(loss: BatchLoss, rows: list[int], values: list[float]) -> list[float]:
    found = []
    for m in range(len(rows)):
        loss(m, number(values[m]))
        (gradient,) = loss.make_output_gradients(m)
        found.append(float(gradient))  # type: ignore[arg-type]
        assert loss.make_output_gradients(m)[0] is gradient, "made once"
    return found


def test_weights_in_the_batch() -> None:
    rows, values = [3, 2, 2], [7.0, 14.0, 21.0]
    mean = BatchLoss(lambda outputs: outputs, None, rows)
    assert weights_of(mean, rows, values) == pytest.approx([3 / 7, 2 / 7, 2 / 7])
    assert float(mean.compute_total()) == pytest.approx(3 + 4 + 6) and not mean.compute_total().requires_grad
    summed = BatchLoss(partial(lambda outputs, reduction: outputs, reduction="sum"), None, rows)
    assert weights_of(summed, rows, values) == [1.0, 1.0, 1.0] and float(summed.compute_total()) == 42.0


@pytest.mark.parametrize("loss_fn", [F.mse_loss, F.binary_cross_entropy, lambda a, b: (a - b).square().flatten()[0]])
def test_losses_that_are_held_hold_no_outputs(loss_fn: Any) -> None:
    """The result of torch's mse_loss holds memory for all elements. Once this memory stayed for all microbatches."""
    outputs, target = torch.rand(4, 8, requires_grad=True), torch.rand(4, 8)
    loss = BatchLoss(loss_fn, Targets([target]), [4])
    value = loss(0, outputs)
    (held,) = loss.list_losses()
    assert held.untyped_storage().nbytes() == held.nbytes and not held.requires_grad
    assert torch.equal(held, value) and value.requires_grad


def test_what_goes_into_one_optimizer_step_is_a_batch_of_its_own() -> None:
    rows = [3, 1, 2, 2]
    loss = BatchLoss(lambda outputs: outputs, None, rows, ends=[1])
    assert weights_of(loss, rows, [8.0] * 4) == [0.75, 0.25, 0.5, 0.5]
    assert float(loss.compute_total()) == 8.0, "the loss that is reported weighs by the whole batch"


def test_each_microbatch_has_its_target_and_failures_a_note() -> None:
    def loss_fn(outputs: Tensor, target: float) -> Tensor:
        return outputs / target

    loss = BatchLoss(loss_fn, Targets([1.0, 4.0]), [1, 1])
    assert loss(1, number(8.0)).item() == 2.0 and loss(0, number(8.0)).requires_grad
    assert float(loss.compute_total()) == 5.0
    with pytest.raises(TypeError) as caught:
        loss(0, None)
    assert caught.value.__notes__ == ["raised by loss_fn"]
    with pytest.raises(InputError, match="returned float"):
        BatchLoss(lambda outputs: 1.0, None, [1])(0, None)  # type: ignore[arg-type, return-value]


class HostReads(TorchDispatchMode):
    """Counts the operators that make a tensor of numbers of the host's, or let the host read one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("lift_fresh", "_local_scalar_dense", "equal"):
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [[3, 2, 2], [2, 2], [1]])
def test_the_loss_of_a_batch_is_computed_without_a_tensor_of_numbers(dtype: torch.dtype, rows: list[int]) -> None:
    """The host waited for the accelerator in every step, to copy the weights of the losses there."""
    given = [torch.rand((), dtype=dtype, requires_grad=True) for _ in rows]
    loss = BatchLoss(lambda outputs: outputs, None, rows)
    with HostReads() as reads:
        for m, value in enumerate(given):
            loss(m, value)
        seeds = [loss.make_output_gradients(m)[0] for m in range(len(rows))]
        total = loss.compute_total()
    assert not reads.found
    exact = sum(v.detach().double() * n / sum(rows) for v, n in zip(given, rows, strict=True))
    torch.testing.assert_close(
        total, torch.as_tensor(exact).to(dtype), rtol=0.0, atol=0.0 if dtype != torch.float64 else 1e-15
    )
    torch.testing.assert_close(torch.stack(seeds), torch.tensor(rows, dtype=torch.float64).div(sum(rows)).to(dtype))  # type: ignore[arg-type]


def test_weights_that_an_accelerator_has_computed_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the host waited for the accelerator in each microbatch, to count the labels that are not ignored."""
    for module in (counts, loss_module):
        monkeypatch.setattr(module, "is_on_host", lambda tensor: False)
    labels = [torch.tensor([1, -100, 2]), torch.tensor([-100, -100]), torch.tensor([0, 1])]
    logits = [torch.randn(len(y), 3, requires_grad=True) for y in labels]
    program: Any = None
    batch = Batch(program, [], [3, 2, 2])
    meaning = LossMeaning(F.cross_entropy, "mean")
    meaning.count = counts.make_label_count({})
    targets = Targets(labels)
    loss = BatchLoss(F.cross_entropy, targets, batch.rows, (), meaning, find_weights(batch, targets, meaning))
    with HostReads() as reads:
        computed = [loss(m, piece) for m, piece in enumerate(logits)]
        seeds = [loss.make_output_gradients(m)[0] for m in range(3)]
        total = loss.compute_total()
    assert not reads.found and all(isinstance(seed, Tensor) for seed in seeds)
    torch.autograd.backward(computed, seeds)
    whole = torch.cat(logits).detach().requires_grad_()
    expected = F.cross_entropy(whole, torch.cat(labels))
    expected.backward()
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(torch.cat([piece.grad for piece in logits]), whole.grad)  # type: ignore[misc]


def test_a_loss_of_weight_zero_need_not_be_a_number() -> None:
    values = torch.tensor([1.0, float("nan"), 3.0, 5.0], dtype=torch.float64)
    weights = [0.25, 0.0, 0.5, 0.5]
    assert float(sum_weighted(values, weights)) == 4.25
    assert float(sum_weighted(values, list(torch.tensor(weights).double()))) == 4.25
