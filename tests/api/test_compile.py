"""A user's calls of a pipeline, each compared with the unsplit model."""

from __future__ import annotations

import copy
import pickle
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.api.verify.compare import compare, run_pipeline_step, run_unsplit_step
from fxsplit.torch_internals.tensors.differences import measure_difference
from tests.support.models import FAST, Buffers, Chunked, LateReader, ManyInputs, Mlp, ModeDependent, Residual, Tied

TIGHT = 1e-10
M = TypeVar("M", bound=nn.Module)
mse = F.mse_loss


def doubled(model: M) -> tuple[M, M]:
    """A model in float64 and a copy of it, to split one and leave the other whole."""
    model = model.double()
    return model, copy.deepcopy(model)


def images(rows: int = 8) -> Tensor:
    return torch.randn(rows, 3, 8, 8, dtype=torch.float64)


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8, dtype=torch.float64)


def by_microbatch(model: nn.Module, x: Tensor, n: int) -> Tensor:
    return torch.cat([model(part) for part in torch.tensor_split(x, n)])


def assert_same_gradients(a: nn.Module, b: nn.Module) -> None:
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert measure_difference(p.grad, q.grad) <= TIGHT, name


def test_two_arguments_are_enough() -> None:
    model, unsplit = doubled(Residual())
    with fxsplit.compile(model, 2) as pipe:
        assert "compiles on its first call" in repr(pipe)
        x = images()
        pipe.eval()
        torch.testing.assert_close(pipe(x), unsplit.eval()(x), rtol=TIGHT, atol=TIGHT)
        assert len(pipe.plan.stages) == 2


def test_unchanged_loop_trains() -> None:
    """criterion(pipe(x), y).backward(); optimizer.step() gives the weights of the micro-batched loop, step by step."""
    model, unsplit = doubled(Residual())
    x, y = images(7), torch.randint(0, 5, (7,))
    with fxsplit.compile(model, 3, n_microbatches=3, passes=FAST) as pipe:
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (pipe, unsplit)]
        for _ in range(3):
            for m, optimizer in zip((pipe, unsplit), optimizers, strict=True):
                optimizer.zero_grad()
                out = pipe(x) if m is pipe else by_microbatch(unsplit, x, 3)
                F.cross_entropy(out, y).backward()
                nn.utils.clip_grad_norm_(m.parameters(), 0.5)
                optimizer.step()
        assert_same_gradients(pipe, unsplit)
        for (name, a), b in zip(pipe.state_dict().items(), unsplit.state_dict().values(), strict=True):
            assert measure_difference(a, b) <= TIGHT, name


def test_input_gets_its_gradient_and_nothing_else_does() -> None:
    """autograd.grad for the input must not touch any parameter's .grad; for a parameter it must work too."""
    model, unsplit = doubled(Mlp())
    x = vectors().requires_grad_()
    with fxsplit.compile(model, 2, n_microbatches=4, passes=FAST) as pipe:
        (found,) = torch.autograd.grad(pipe(x).square().sum(), x)
        (expected,) = torch.autograd.grad(unsplit(x).square().sum(), x)
        assert measure_difference(found, expected) <= TIGHT
        assert all(p.grad is None for p in pipe.parameters())
        (weight,) = torch.autograd.grad(pipe(x).square().sum(), model.get_parameter("layers.0.weight"))
        (wanted,) = torch.autograd.grad(unsplit(x).square().sum(), unsplit.get_parameter("layers.0.weight"))
        assert measure_difference(weight, wanted) <= TIGHT


def test_step_accumulates_over_two_steps() -> None:
    model, unsplit = doubled(Residual())
    with fxsplit.compile(model, 2, n_microbatches=4, loss_fn=F.cross_entropy, passes=FAST) as pipe:
        for _ in range(2):
            x, y = images(9), torch.randint(0, 5, (9,))
            expected = run_unsplit_step(unsplit, [x], y, F.cross_entropy, 4)
            found = run_pipeline_step(pipe, [x], y)
        assert compare(found, expected).largest <= TIGHT


def test_step_returns_the_loss_of_the_whole_batch() -> None:
    model, unsplit = doubled(Mlp())
    x, y = vectors(7), torch.randn(7, 3, dtype=torch.float64)
    for loss_fn in (mse, nn.MSELoss(reduction="sum")):
        with fxsplit.compile(copy.deepcopy(model), 2, n_microbatches=3, loss_fn=loss_fn, passes=FAST) as pipe:
            loss, outputs = pipe.step(x, target=y, return_outputs=True)
            assert not loss.requires_grad and not outputs.requires_grad
            assert measure_difference(loss, loss_fn(unsplit(x), y)) <= TIGHT
            unsplit.zero_grad()
            loss_fn(unsplit(x), y).backward()
            assert_same_gradients(pipe, unsplit)


class Again(torch.autograd.Function):
    """Runs a block again in its backward, and itself adds to the gradients of the block's weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Any:
        ctx.block, ctx.x = block, x.detach()
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Any:
        return Again.apply(x, self.inner)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("held", [None, 3.0])
def test_compiling_adds_to_no_gradient(held: float | None) -> None:
    """Not even if the model's own backward adds to `.grad` whenever it runs."""
    model = nn.Sequential(nn.Linear(8, 8), Reversible(), nn.Linear(8, 3)).double()
    unsplit, x, y = copy.deepcopy(model), vectors(), torch.ones(8, 3).double()
    for weight in (*model.parameters(), *unsplit.parameters()):
        weight.grad = None if held is None else torch.full_like(weight, held)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST, n_microbatches=2, loss_fn=F.mse_loss) as pipe:
        assert all(weight.grad is gradients[name] for name, weight in model.named_parameters())
        assert held is None or all(bool((w.grad == held).all()) for w in model.parameters() if w.grad is not None)
        pipe.step(x, target=y)
        F.mse_loss(unsplit(x), y).backward()
        assert_same_gradients(pipe, unsplit)
        assert fxsplit.verify(pipe, x).equal


def test_gradient_hooks_run_once_on_the_sum() -> None:
    model, unsplit = doubled(Mlp())
    x, y = vectors(), torch.randn(8, 3, dtype=torch.float64)
    calls: list[str] = []
    for m in (model, unsplit):
        m.get_parameter("layers.1.weight").register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        m.get_parameter("layers.2.weight").register_post_accumulate_grad_hook(lambda p: calls.append("after"))
    with fxsplit.compile(model, 2, n_microbatches=4, loss_fn=mse, passes=FAST) as pipe:
        pipe.step(x, target=y)
        assert calls == ["after"]
        mse(unsplit(x), y).backward()
        assert_same_gradients(pipe, unsplit)
        pipe.zero_grad()
        mse(pipe(x), y).backward()
        assert_same_gradients(pipe, unsplit)
        assert calls == ["after"] * 3


def test_state_dict_goes_both_ways() -> None:
    model, other = Residual(), Residual()
    x = torch.randn(8, 3, 8, 8)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        assert list(pipe.state_dict()) == list(other.state_dict())
        assert [n for n, _ in pipe.named_parameters()] == [n for n, _ in other.named_parameters()]
        pipe.load_state_dict(other.state_dict())
        pipe.eval()
        torch.testing.assert_close(pipe(x), other.eval()(x))
        other.load_state_dict(pipe.state_dict())
        pipe.load_state_dict(Residual().state_dict(), assign=True)
        torch.testing.assert_close(pipe(x), model(x))


def test_assigned_parameters_are_used_where_the_graph_fetches_them() -> None:
    model, other = Buffers(), Buffers()
    other.scale.data.mul_(3.0)
    x = torch.randn(8, 8)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        pipe.load_state_dict(other.state_dict(), assign=True)
        torch.testing.assert_close(pipe(x), other(x))


def test_parameters_are_the_users_own() -> None:
    model = Residual()
    modules, parameters = list(model.modules()), list(model.parameters())
    with fxsplit.compile(model, 2, example_inputs=torch.randn(8, 3, 8, 8), passes=FAST) as pipe:
        assert all(a is b for a, b in zip(pipe.parameters(), parameters, strict=True))
        assert all(a is b for a, b in zip(list(pipe.modules())[1:], modules[1:], strict=True))
        in_stages = {id(p) for s in pipe.stages.stages for p in s.module.parameters()}
        assert in_stages == {id(p) for p in parameters}


def test_compiling_leaves_no_trace_on_the_model() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with fxsplit.compile(model, 2, example_inputs=torch.randn(8, 8, generator=torch.Generator())):
        assert torch.equal(torch.rand(3), expected)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())


def test_train_and_eval_follow_the_model_both_ways() -> None:
    model = Residual()
    with fxsplit.compile(model, 2, example_inputs=torch.randn(8, 3, 8, 8), passes=FAST) as pipe:
        pipe.eval()
        assert not model.training and not model.bn1.training
        model.train()
        assert pipe.training and model.bn1.training


def test_modes_with_different_graphs_share_parameters_and_stages() -> None:
    """Auxiliary output in training, none in eval; each parameter stays on its stage."""
    model, unsplit = doubled(ModeDependent())
    x = vectors(9)
    with fxsplit.compile(model, 3, n_microbatches=3, passes=FAST) as pipe:
        got = pipe(x)
        assert set(got) == {"main", "aux"} and got["aux"][1] is None and type(got["aux"]) is tuple
        expected = [unsplit(part) for part in torch.tensor_split(x, 3)]
        assert measure_difference(got["main"], torch.cat([e["main"] for e in expected])) <= TIGHT
        (got["main"].sum() + got["aux"][0].square().sum()).backward()
        sum(e["main"].sum() + e["aux"][0].square().sum() for e in expected).backward()
        assert_same_gradients(pipe, unsplit)
        homes = {id(p): s.index for s in pipe.stages.stages for p in s.module.parameters()}
        pipe.eval(), unsplit.eval()
        assert measure_difference(pipe(x), unsplit(x)) <= TIGHT
        for stage in pipe.stages.stages:
            assert all(homes[id(p)] == stage.index for p in stage.module.parameters())


@pytest.mark.parametrize("model", [LateReader, Tied, Buffers, Chunked])
@pytest.mark.parametrize("devices", [2, 3])
def test_awkward_models_equal_unsplit(model: type[nn.Module], devices: int) -> None:
    torch.manual_seed(3)
    split, unsplit = doubled(model())
    x = vectors(7)
    y = torch.randn(7, unsplit(x).shape[1], dtype=torch.float64)
    unsplit.load_state_dict(split.state_dict())
    with fxsplit.compile(split, devices, n_microbatches=3, loss_fn=mse, passes=FAST) as pipe:
        expected = run_unsplit_step(unsplit, [x], y, mse, 3)
        found = compare(run_pipeline_step(pipe, [x], y), expected)
        assert found.largest <= TIGHT, f"{found} at {found.worst}"
        assert list(pipe.state_dict()) == list(unsplit.state_dict())


def test_structured_inputs_and_outputs() -> None:
    model, unsplit = doubled(ManyInputs())
    batch = {"ids": torch.randint(0, 10, (6, 4)), "extra": torch.randn(6, 4, 8, dtype=torch.float64)}
    mask = (torch.rand(6, 4) > 0.3).double()
    with fxsplit.compile(model, 2, n_microbatches=3, passes=FAST) as pipe:
        got, expected = pipe(batch, mask, double=True), unsplit(batch, mask, double=True)
        assert got["kind"] == "scores" and type(got) is dict
        assert measure_difference(got["scores"], expected["scores"]) <= TIGHT
        again = pipe(batch=batch, mask=mask, double=True)
        assert torch.equal(again["scores"], got["scores"])
        # Each is another way of calling the model, which compiles for itself.
        assert measure_difference(pipe(batch, mask)["scores"], unsplit(batch, mask)["scores"]) <= TIGHT
        without = pipe(batch, double=True)["scores"], unsplit(batch, double=True)["scores"]
        assert measure_difference(*without) <= TIGHT


@pytest.mark.parametrize("rows", [8, 9, 11, 3, 64])
def test_any_batch_size(rows: int) -> None:
    """Uneven microbatches and later batches of other sizes: every row of the output belongs to a row of the input."""
    model, unsplit = doubled(Residual())
    with fxsplit.compile(model, 2, example_inputs=images(8), n_microbatches=3, passes=FAST) as pipe:
        pipe.eval(), unsplit.eval()
        x = images(rows)
        with torch.no_grad():
            assert measure_difference(pipe(x), unsplit(x)) <= TIGHT
        assert pipe(x).shape == (rows, 5)


def test_default_microbatches_shrink_with_the_batch() -> None:
    model, unsplit = doubled(Mlp())
    with fxsplit.compile(model, 2, example_inputs=vectors(32), passes=FAST) as pipe:
        assert pipe.plan.n_microbatches == 4
        for rows in (1, 2, 33):
            x = vectors(rows)
            assert measure_difference(pipe(x), unsplit(x)) <= TIGHT


def test_no_grad_and_inference_mode() -> None:
    model, unsplit = doubled(Mlp())
    x = vectors()
    with fxsplit.compile(model, 2, passes=FAST) as pipe:
        with torch.inference_mode():
            got = pipe(x)
            assert got.is_inference()
        with torch.no_grad():
            assert not pipe(x).requires_grad
        assert measure_difference(got, unsplit(x)) <= TIGHT
        pipe(x).sum().backward()  # compiled under inference_mode, and trains all the same
        unsplit(x).sum().backward()
        assert_same_gradients(pipe, unsplit)


def test_autocast_reaches_the_workers() -> None:
    model = Mlp()
    unsplit = copy.deepcopy(model)
    x = torch.randn(8, 8)
    with fxsplit.compile(model, 2, n_microbatches=2, passes=FAST) as pipe:
        with torch.autocast("cpu", torch.bfloat16):
            got, expected = pipe(x), by_microbatch(unsplit, x, 2)
        assert got.dtype == expected.dtype == torch.bfloat16
        assert torch.equal(got, expected)
        got.float().sum().backward()
        expected.float().sum().backward()
        for p, q in zip(pipe.parameters(), unsplit.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-2)


def test_frozen_parameters_stay_frozen_and_can_be_thawed() -> None:
    model, unsplit = doubled(Mlp())
    x, y = vectors(), torch.randn(8, 3, dtype=torch.float64)
    for m in (model, unsplit):
        m.layers[0].requires_grad_(False)
    with fxsplit.compile(model, 2, n_microbatches=2, loss_fn=mse, passes=FAST) as pipe:
        for thawed in (False, True):
            for m in (model, unsplit):
                m.layers[0].requires_grad_(thawed)
                m.zero_grad()
            pipe.step(x, target=y)
            mse(unsplit(x), y).backward()
            assert (model.layers[0].weight.grad is not None) is thawed
            assert_same_gradients(pipe, unsplit)


def test_outputs_cannot_be_backwarded_twice() -> None:
    with fxsplit.compile(Mlp(), 2, passes=FAST) as pipe:
        out = pipe(torch.randn(8, 8)).sum()
        out.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="backwarded already"):
            out.backward()


def test_unused_output_needs_no_gradient() -> None:
    model, unsplit = doubled(ModeDependent())
    x = vectors(6)
    with fxsplit.compile(model, 2, n_microbatches=2, passes=FAST) as pipe:
        pipe(x)["main"].sum().backward()
        sum(unsplit(part)["main"].sum() for part in torch.tensor_split(x, 2)).backward()
        assert_same_gradients(pipe, unsplit)


def test_hooks_of_the_model_fire() -> None:
    model = Mlp()
    seen: list[Any] = []
    model.register_forward_hook(lambda m, args, out: seen.append(("model", out.shape[0])))
    model.layers[1].register_forward_hook(lambda m, args, out: seen.append(("layer", out.shape[0])))
    with fxsplit.compile(model, 2, example_inputs=torch.randn(8, 8), n_microbatches=4, passes=FAST) as pipe:
        seen.clear()
        pipe(torch.randn(8, 8))
        assert seen == [("layer", 2)] * 4 + [("model", 8)]


def test_copies_without_the_model_are_refused() -> None:
    with fxsplit.compile(Mlp(), 2) as pipe:
        with pytest.raises(fxsplit.FxsplitError, match="cannot be copied without its model"):
            copy.copy(pipe)
        with pytest.raises(fxsplit.FxsplitError, match="cannot be pickled"):
            pickle.dumps(pipe)


def test_memory_is_given_back() -> None:
    """Neither profiling nor running keeps any of the model's tensors alive."""
    import gc
    import weakref

    model = Residual()
    watched = [weakref.ref(p) for p in model.parameters()]
    with fxsplit.compile(model, 2, loss_fn=F.cross_entropy) as pipe:
        pipe.step(torch.randn(8, 3, 8, 8), target=torch.randint(0, 5, (8,)))
        pipe(torch.randn(8, 3, 8, 8))
    del model, pipe
    gc.collect()
    assert all(ref() is None for ref in watched)


def test_of_a_model_under_torch_compile_the_module_inside_is_taken() -> None:
    """Compiling must not fail on the class attribute of networkx that torch.compile changes."""
    model, x = Mlp().double(), torch.randn(8, 8).double()
    wrapped: Any = torch.compile(torch.compile(model, backend="eager"), backend="eager")
    with (
        pytest.warns(fxsplit.FxsplitWarning, match='is under torch.compile, .* unless stage_backend="inductor"'),
        fxsplit.compile(wrapped, 2, example_inputs=x, passes=FAST) as pipe,
    ):
        assert pipe.model is model and pipe.state_dict().keys() == model.state_dict().keys()
        torch.testing.assert_close(pipe(x), model(x), rtol=1e-10, atol=1e-10)
    assert fxsplit.profile(wrapped, x, repeats=1).nodes
