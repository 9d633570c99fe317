"""Observations of small graphs: each node's bytes, owners, writes and draws, worked out by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxsplit
from fxsplit.errors import FxsplitError, TraceError
from fxsplit.torch_internals.fx.observe import Observation, observe
from fxsplit.torch_internals.random import seeded_calls as rng
from tests.support.text_models import make_prompt, make_text_model

FLOATS = 4 * 8 * 4  # bytes of float32[4, 8]


class Layers(nn.Module):
    """A linear layer, a nonlinearity, a batch norm, and the parts of a split."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norm(torch.tanh(self.linear(x))).chunk(2, dim=1)
        result: Tensor = first + second
        return result


class Parts(fx.Tracer):
    """Traces `chunk` as a container with two items."""

    def iter(self, obj: Any) -> Any:
        return iter([obj[0], obj[1]])


def trace(model: nn.Module) -> fx.GraphModule:
    return fx.GraphModule(model, Parts().trace(model))


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 8)))


def test_bytes_of_what_is_made_and_kept() -> None:
    model = Layers()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    seen = observe(trace(model), [x()])
    assert seen["x"] == Observation(
        "float32[4, 8]",
        False,
        FLOATS,
        0,
        FLOATS,
        ("x",),
        storage_bytes=FLOATS,
        kept_for="linear",
        kept_for_bytes=FLOATS,
    )
    assert seen["linear"] == Observation(
        "float32[4, 8]", False, FLOATS, FLOATS, 0, ("linear",), storage_bytes=FLOATS, unkept_bytes=FLOATS
    )
    assert seen["tanh"].kept_bytes == FLOATS
    assert seen["norm"].mutates == (), "running statistics lie in the module, and no node reads them"
    assert seen["chunk"].is_container and seen["chunk"].text == "tuple" and seen["chunk"].owners == ("norm",)
    assert seen["getitem"].text == "float32[4, 4]" and not seen["getitem"].is_container
    assert seen["add"].owners == ("add",) and seen["output"].owners == ("add",)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("from_shapes", [False, True])
def test_writes_and_draws(from_shapes: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            flat = x.view(-1)
            flat.add_(1)
            result: Tensor = self.drop(x) + torch.rand_like(x).detach_()
            return result

    gm, rows = trace(Model().eval()), x()
    state = torch.get_rng_state()
    seen = observe(gm, [rows], from_shapes=from_shapes)
    assert torch.equal(torch.get_rng_state(), state)
    assert seen["view"].owners == ("x",) and seen["view"].mutates == ()
    assert seen["add_"].mutates == ("x",)
    assert seen["detach_"].mutates == ("rand_like",)
    draws = {name for name, node in seen.items() if node.draws}
    assert draws == {"drop", "rand_like"}, "a dropout draws in training, whatever the mode is now"


def test_weights_draw_nothing_while_other_threads_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    moves = itertools.count()
    monkeypatch.setattr(rng, "read_generators", lambda: [bytes(next(moves))])
    draws = {name for name, node in observe(trace(Model()), [x()]).items() if node.draws}
    assert draws == {"mul"}, "only a call can draw; a stage holds each node that draws as a module"


def test_visits_see_what_is_called() -> None:
    visited = []
    model = Layers()
    observe(trace(model), [x()], lambda node, call, args, kwargs: visited.append((node.name, call, len(args))))
    assert visited[0] == ("linear", model.linear, 1) and visited[1] == ("tanh", torch.tanh, 1)
    assert visited[3] == ("chunk", "chunk", 2) and [name for name, *_ in visited][-1] == "add"


def test_a_tensor_that_is_trained_and_no_parameter_is_refused() -> None:
    foreign = torch.ones(8, requires_grad=True)
    gm = trace(nn.Linear(8, 8))
    with gm.graph.inserting_before(gm.graph.output_node()):
        node = gm.graph.call_function(lambda value: value * foreign, (gm.graph.output_node().args[0],))
    gm.graph.output_node().args = (node,)
    with pytest.raises(TraceError, match=r"trains a tensor \(float32\[8\]\) that is not one of its parameters"):
        observe(gm, [x()])


def test_what_a_hook_keeps_of_an_observed_graph_names_the_hook() -> None:
    """The error mentioned an observed graph, which means nothing to a user."""
    model, kept = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), list[Tensor]()
    model[1].register_forward_hook(lambda module, args, output: kept.append(output))
    observe(trace(model), [x()])
    with pytest.raises(
        FxsplitError, match=r"computed while a pipeline was compiled, and that a hook .*example_inputs="
    ):
        kept[0].sum().backward()


def test_tensors_that_are_read_in_another_order_of_memory() -> None:
    """A gradient comes back transposed from a transpose, even through element-wise operators."""

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(4, 4)

        def forward(self, given: Tensor) -> Tensor:
            made: Tensor = self.second(torch.tanh(self.first(given)).t())
            return torch.relu(made)

    seen = observe(fx.symbolic_trace(Turns()), [x()])
    assert [name for name, found in seen.items() if found.is_read_turned] == ["first", "tanh"]
    assert seen["t"].is_turned and not seen["tanh"].is_turned
    assert seen["t"].storage_bytes == FLOATS == seen["tanh"].storage_bytes


def test_who_keeps_a_tensor_and_who_joins_it() -> None:
    """If a convolution's output is concatenated, its gradient is a part of a larger one, which it copies."""

    class Joins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, given: Tensor) -> Tensor:
            made = self.first(given)
            return torch.cat([torch.tanh(made + 1).view(4, 8), self.norm(made)], 1)

    seen = observe(fx.symbolic_trace(Joins()), [x()])
    assert [name for name, found in seen.items() if found.is_read_joined] == ["first", "add", "tanh", "view", "norm"]
    assert (seen["first"].kept_for, seen["first"].kept_for_bytes) == ("norm", FLOATS)
    assert (seen["tanh"].kept_for, seen["tanh"].kept_bytes) == ("", FLOATS)
    assert seen["norm"].written_bytes == 2 * 8 * 4 + 8 and seen["norm"].mutates == ()


@pytest.mark.parametrize("whole", [False, True])
def test_an_activation_that_a_hook_lets_want_a_gradient_trains_what_comes_after(whole: bool) -> None:
    """Adapters with gradient checkpointing ask for it at a frozen embedding, and the model was refused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    model[0].register_forward_hook(lambda module, args, out: out.requires_grad_(True))
    ids = torch.randint(20, (8, 5))
    model(ids).square().sum().backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    passes = [fxsplit.leaf("0"), *fxsplit.DEFAULT] if whole else fxsplit.DEFAULT
    with fxsplit.compile(model, 2, n_microbatches=4, passes=passes) as pipe:
        pipe(ids).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-10)


def compare_kept_whole(inner: nn.Module) -> None:
    """Compare a pipeline, in which `inner` stays whole, with the unsplit model: outputs and every gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 3)).double()
    x = torch.randn(8, 6, dtype=torch.float64)
    wanted = model(x)
    gradients = torch.autograd.grad(wanted.square().sum(), [*model.parameters()], allow_unused=True)
    with fxsplit.compile(model, 2, n_microbatches=4, passes=[fxsplit.leaf("1"), *fxsplit.DEFAULT]) as pipe:
        found = pipe(x)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
        found.square().sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-10)


class Forces(nn.Module):
    """Takes a gradient of its own in forward()."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.requires_grad_() if x.is_leaf else x
            return torch.autograd.grad(self.b(torch.tanh(self.a(x))).sum(), x, create_graph=True)[0]


def test_a_submodule_that_takes_gradients_by_itself_is_right() -> None:
    """Its own backward was mistaken for a backward through a tensor kept by a hook."""
    compare_kept_whole(Forces())


class Takes(nn.Module):
    """Takes gradients of its own in forward(), in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(6, 8), nn.Linear(8, 1), how

    def compute_energy(self, x: Tensor) -> Tensor:
        made: Tensor = self.b(torch.tanh(self.a(x)))
        return made

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "grad":
            slope: Tensor = torch.func.grad(lambda t: self.compute_energy(t).sum())(x)
            return x * slope
        if self.how == "vjp":
            pulled: Any = torch.func.vjp(self.compute_energy, x)
            back: Tensor = pulled[1](torch.ones_like(pulled[0]))[0]
            return x * back
        with torch.enable_grad():
            if self.how == "detached":
                by = x.detach().requires_grad_()
            elif self.how == "made":
                by = torch.zeros_like(x, requires_grad=True)
            else:
                by = x = x.requires_grad_() if x.is_leaf else x
            energy = self.compute_energy(x + by if self.how == "made" else by).sum()
            slope = torch.autograd.grad(energy, by, create_graph=self.how != "plain")[0]
        return x + slope.square().sum(1, keepdim=True)


@pytest.mark.parametrize("how", ["penalty", "plain", "grad", "vjp", "detached", "made"])
def test_every_way_to_take_gradients_is_right_in_a_submodule(how: str) -> None:
    """A tensor that forward() makes to take a gradient by it was refused, as if somebody else had it."""
    compare_kept_whole(Takes(how))


@pytest.mark.long  # the environment of this test has transformers
@pytest.mark.parametrize("whole", [False, True])
def test_a_transformer_asks_for_gradients_of_its_frozen_embedding(whole: bool) -> None:
    """As training of adapters with gradient checkpointing does."""
    model = make_text_model("llama")
    model.config.use_cache = False
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.up_proj.requires_grad_(True)
    model.enable_input_require_grads()
    ids = make_prompt(model, rows=4)["input_ids"]
    model(ids).logits.square().mean().backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    passes = [*([fxsplit.leaf("model.embed_tokens")] if whole else []), *fxsplit.DEFAULT]
    with fxsplit.compile(model, 2, n_microbatches=2, passes=passes) as pipe:
        pipe(ids).logits.square().mean().backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-10)


class Alone(Takes):
    """Asks for no grad mode of its own, so that it cannot run under no_grad."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(self.compute_energy(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("model", [Alone("penalty"), Forces(), Takes("plain"), Takes("grad"), Takes("vjp")])
@pytest.mark.parametrize("grad", [True, False])
def test_a_model_that_takes_gradients_itself_is_told_where_and_what_to_do(model: nn.Module, grad: bool) -> None:
    """It ended in torch's own words, of fake tensors among constants."""
    said = rf"^{type(model).__name__} takes a gradient by itself in its own forward\(\) at .*test_observe\.py:\d+, "
    with torch.set_grad_enabled(grad), pytest.raises(TraceError, match=rf"{said}.*enable_grad\(\).*leaf\('its\.path"):
        fxsplit.compile(model, 2, example_inputs=torch.randn(8, 6), n_microbatches=4)


def test_a_submodule_that_takes_gradients_and_fails_without_them_is_told() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(6, 6), Alone("penalty")

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(self.first(x))
            return out

    with pytest.raises(TraceError, match=r"in submodule 'inner' at .*enable_grad\(\).*leaf\('inner'\)"):
        fxsplit.compile(Around(), 2, example_inputs=torch.randn(8, 6), n_microbatches=4)
