"""Front ends: whichever way a model becomes a graph, it is the model, in training and in evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxsplit
from fxsplit.errors import InputError, TraceError
from fxsplit.schedule.generators.catalogue import ScheduleName
from tests.support.models import FAST, Mlp


def proven(model: nn.Module, *args: Any, passes: Any = FAST, n: int = 2, **kwargs: Any) -> str:
    """Verify the model in both modes; return the front end that captured it in training."""
    ends = []
    for training in (True, False):
        with fxsplit.compile(model, 2, n_microbatches=n, passes=passes) as pipe:
            pipe.train(training)
            found = fxsplit.verify(pipe, args, kwargs)
            assert found.equal, found.offending
            assert found.stages == 2
            ends.append(found.front_end)
    model.train()
    return ends[0]


class Branches(nn.Module):
    """Decides by shapes, enters and leaves modes, and has about everything that torch.export writes differently."""

    scale: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.twice = self.c
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor, *, mask: Tensor | None = None, gain: float = 1.0) -> dict[str, Any]:
        if x.shape[1] != 8:
            raise ValueError("eight features")
        h = self.norm(self.a(x)) * self.scale
        h = h + self.frozen(h) * gain
        with torch.no_grad():
            weight = F.softmax(self.b(h), -1)
        h = self.drop(self.b(h)) * weight + torch.arange(8, device=x.device)
        if mask is not None:
            h = h.masked_fill(mask[:, None], 0.0)
        h[:, 0] = 1.0
        self.count.add_(1)
        return {"out": self.twice(torch.tanh(self.c(h))), "none": None, "flags": (h > 0)}


def test_symbolic_trace_comes_first() -> None:
    assert proven(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(6, 8)) == "symbolic_trace"


def test_export_follows_where_tracing_fails() -> None:
    model = Branches()
    keys = list(model.state_dict())
    assert proven(model, torch.randn(6, 8)) == "export"
    assert proven(model, torch.randn(7, 8), mask=torch.rand(7) > 0.5, gain=2.0, n=3) == "export"
    assert list(model.state_dict()) == keys and all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_an_exported_graph_is_the_models_own() -> None:
    """Its parameters and buffers are the very objects; modes have a graph each; hooks, dtypes and rows may change."""
    model, x = Branches().double(), torch.randn(6, 8, dtype=torch.float64)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=3, passes=FAST) as pipe:
        held = {id(w) for s in pipe.stages.stages for w in (*s.module.parameters(), *s.module.buffers())}
        mine = {id(w) for w in (*model.parameters(), *model.buffers())}
        assert mine - held == set() and "self.norm(" in "".join(s.code for s in pipe.stages.stages)
        assert [n for n in pipe.costs.nodes if n.module == "norm"]
        pipe.eval()
        for rows in (6, 3, 5):
            x = torch.randn(rows, 8, dtype=torch.float64)
            torch.testing.assert_close(pipe(x)["out"], model(x)["out"])
        pipe.train()
        assert pipe.front_end == "export"


def test_an_exported_graph_follows_the_models_dtype() -> None:
    """Its conversions are of the dtypes there were; another needs another graph."""

    class Converts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.a, self.b = nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, ids: Tensor) -> Tensor:
            if ids.shape[1] > 100:
                return ids
            h = torch.tanh(self.a(self.embed(ids))).to(self.b.weight.dtype)
            out: Tensor = self.b(h + torch.linspace(0, 1, 8, dtype=h.dtype))
            return out

    model, ids = Converts(), torch.randint(0, 5, (6, 3))
    with fxsplit.compile(model, 2, example_inputs=ids, n_microbatches=2, passes=FAST) as pipe:
        torch.testing.assert_close(pipe(ids), model(ids))
        model.double()
        with pytest.warns(UserWarning, match="compiling again, because attribute 'a.bias.dtype'") as said:
            found = pipe(ids)
        # It pointed into torch: a fixed number of frames was counted, and nn.Module's call has some of its own.
        assert said[0].filename == __file__
        torch.testing.assert_close(found, model(ids), rtol=1e-12, atol=1e-12)


def test_a_graph_module_is_taken_as_it_is() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor, extra: dict[str, Any]) -> Tensor:
            out: Tensor = self.head(self.inner(x) * extra["gain"] + extra["bias"])
            return out

    class KeepInner(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return module_qualified_name == "inner" or super().is_leaf_module(m, module_qualified_name)

    model = Whole()
    gm = fx.GraphModule(model, KeepInner().trace(model))
    extra = {"gain": 2.0, "bias": torch.randn(6, 8)}
    assert proven(gm, torch.randn(6, 8), extra) == "graph_module"
    with fxsplit.compile(gm, 2, example_inputs=(torch.randn(6, 8), extra), n_microbatches=2, passes=FAST) as pipe:
        assert "inner" in {n.module for n in pipe.costs.nodes}, "what the user's tracer kept whole stays whole"


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e6:
            return -x
        return x * self.scale


class Around(nn.Module):
    """Neither front end can follow the code of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.inner, self.b = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), Decides()), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.inner(self.a(x))))
        return out


def test_what_no_front_end_can_follow_stays_whole() -> None:
    with pytest.warns(
        UserWarning, match=r"'inner.1' of Around stays whole.*test_frontend.py:\d+, 'if x.sum\(\) > 1e6:'"
    ):
        assert proven(Around(), torch.randn(6, 8)) == "symbolic_trace, with submodules kept whole"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stated = fxsplit.Chain((fxsplit.leaf("inner.1"), *fxsplit.DEFAULT))
        assert proven(Around(), torch.randn(6, 8), passes=stated) == "symbolic_trace"
        assert proven(Around(), torch.randn(6, 8), passes="leaf{path=inner}," + FAST) == "symbolic_trace"
    with pytest.raises(TraceError, match=r"leaf\('innner'\): Around has no such submodule; it has a, inner, b"):
        fxsplit.compile(Around(), 2, example_inputs=torch.randn(6, 8), passes="leaf{path=innner}," + FAST)
    with pytest.raises(TraceError, match=r"leaf\('scale'\): Around has no such submodule"):
        fxsplit.compile(Around(), 2, example_inputs=torch.randn(6, 8), passes="leaf{path=scale}," + FAST)
    with pytest.raises(
        TraceError,
        match=r"torch.export cannot follow Decides .*:\d+.*Before that, symbolic tracing cannot follow Decides",
    ):
        fxsplit.compile(Decides(), 1, example_inputs=torch.randn(6, 8), passes=FAST)


class Reverse(torch.autograd.Function):
    """A gradient reversal layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.scale * gradient, None


class Adversarial(nn.Module):
    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.a, self.b, self.c, self.branches = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), branches

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.branches and x.shape[1] > 100:
            raise ValueError("too wide")
        h = self.a(x)
        return self.b(h), self.c(torch.tanh(Reverse.apply(h, 0.5)))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("branches", "front_end"), [(False, "symbolic_trace"), (True, "export")])
def test_a_backward_of_the_users_own_is_kept(branches: bool, front_end: str) -> None:
    """If it were traced through, it would be lost, and outputs would not show it."""
    assert proven(Adversarial(branches), torch.randn(6, 8)) == front_end


class MyNorm(nn.BatchNorm1d):
    """As timm's: a batch norm from outside torch, with an activation."""

    def forward(self, input: Tensor) -> Tensor:
        training = self.training or not self.track_running_stats
        return F.relu(
            F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, training, 0.1, self.eps)
        )


def test_a_batch_norm_of_the_users_own_knows_both_modes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), MyNorm(8), nn.Linear(8, 3))
    assert proven(model, torch.randn(6, 8)) == "symbolic_trace"


def test_an_exported_graph_is_for_its_shapes() -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x) if x.shape[0] > 2 else self.a(x) * 2
            out: Tensor = self.b(h)
            return out

    model = Long()
    with pytest.warns(fxsplit.FxsplitWarning, match="the rows of output 0 of Long depend on each other"):
        pipe = fxsplit.compile(model, 2, example_inputs=torch.randn(12, 4, 8), n_microbatches=3, passes=FAST)
    with pipe:
        torch.testing.assert_close(pipe(torch.randn(9, 4, 8)).shape, torch.Size([9, 4, 8]))
        with pytest.raises(
            InputError, match=r"a microbatch has 2 rows, and forward\(\) takes another branch .* for 3 to any"
        ):
            pipe(torch.randn(6, 4, 8))


def test_one_row_and_one_tensor_twice() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if x.shape[1] > 100:
                return x
            out: Tensor = self.b(torch.tanh(self.a(x))) + 2 * y
            return out

    x = torch.randn(3, 8)
    assert proven(Sum(), x, x, n=3) == "export"
    model = Sum()
    with fxsplit.compile(model, 2, example_inputs=(x, x), n_microbatches=3, passes=FAST) as pipe:
        y = torch.randn(3, 8)
        torch.testing.assert_close(pipe(x, y), model(x, y))


class Drops(nn.Module):
    """Skips a layer now and then, with a rate that may be zero."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers, self.rate = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), rate

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 100:
            return x
        for layer in self.layers:
            if self.training and torch.rand([]) < self.rate:
                continue
            x = torch.tanh(layer(x))
        return x


def test_layer_drop_of_rate_zero_never_drops() -> None:
    assert proven(Drops(0.0), torch.randn(6, 8)) == "export"
    with pytest.raises(TraceError, match=r"Before that, symbolic tracing cannot follow"):
        fxsplit.compile(Drops(0.5), 2, example_inputs=torch.randn(6, 8), passes=FAST)


class DropsTwice(Drops):
    """Draws whether to skip a layer, and has a dropout after it."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


def test_a_dropout_behind_layer_drop_of_rate_zero_draws_as_in_the_model() -> None:
    # OPT, Bart and their kin were refused unless every dropout was off: the graph lacked the draws of layer drop.
    x = torch.randn(6, 8)
    with fxsplit.compile(DropsTwice(0.0), 2, example_inputs=x, passes=FAST) as pipe:
        assert pipe.front_end == "export"
        torch.manual_seed(0)
        kept = pipe(x) != 0
        assert kept.any() and not kept.all()
    with pytest.raises(TraceError, match=r"Before that, symbolic tracing cannot follow"):
        fxsplit.compile(DropsTwice(0.5), 2, example_inputs=x, passes=FAST)


class Cache:
    """Nothing that torch's pytrees know."""


class Caches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        if x.shape[1] > 100:
            return {}
        return {"logits": self.b(torch.tanh(self.a(x))), "cache": Cache()}


def test_an_output_that_cannot_be_handed_on_is_left_out_and_named() -> None:
    model, x = Caches(), torch.randn(6, 8)
    with (
        pytest.warns(UserWarning, match="Caches returns cache, which a pipeline cannot hand on"),
        fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=FAST) as pipe,
    ):
        found = pipe(x)
        assert list(found) == ["logits"]
        torch.testing.assert_close(found["logits"], model(x)["logits"])


def test_an_output_without_a_key_that_cannot_be_handed_on_is_refused() -> None:
    """Hugging Face's models return a cache in a tuple with return_dict=False: the error was torch.export's own."""

    class Tuple(Caches):
        def forward(self, x: Tensor) -> Any:
            return tuple(super().forward(x).values())

    with pytest.raises(InputError, match=r"^Tuple returns a Cache in a tuple, .* use_cache=False, .* return_dict=True"):
        fxsplit.compile(Tuple(), 2, example_inputs=torch.randn(6, 8), n_microbatches=2, passes=FAST)


@pytest.mark.parametrize("build", [Branches, lambda: Adversarial(True)], ids=["branches", "function"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1", "Interleaved1F1B"])
def test_exported_graphs_run_under_any_schedule(build: Callable[[], nn.Module], schedule: ScheduleName) -> None:
    with fxsplit.compile(build(), 2, n_microbatches=4, passes=FAST, schedule=schedule) as pipe:
        found = fxsplit.verify(pipe, torch.randn(8, 8))
        assert found.equal, found.offending


def test_deferred_batch_norm_of_an_exported_graph() -> None:
    model, x = Branches().double(), torch.randn(8, 8, dtype=torch.float64)
    seen: list[Tensor] = []
    model.a.register_forward_hook(lambda m, args, out: seen.append(out.detach()))
    model(x)
    expected = seen[0].mean(0)
    model.a._forward_hooks.clear()
    model.norm.reset_running_stats()
    options: Any = {"n_microbatches": 4, "passes": FAST, "deferred_batch_norm": True}
    with fxsplit.compile(model, 2, example_inputs=x, **options) as pipe:
        pipe(x)
    torch.testing.assert_close(model.norm.running_mean, 0.1 * expected)
    assert int(model.norm.num_batches_tracked) == 1  # type: ignore[arg-type]


class Checkpoints(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(checkpoint(self.layers[0], x, use_reentrant=False))
        result: Tensor = self.layers[3](self.layers[2](torch.tanh(self.layers[1](x))))
        return result


def test_checkpointing_inside_the_model_is_noticed() -> None:
    """A graph computes the same but keeps more memory, so a user who asked for less gets a warning."""
    x = torch.randn(8, 8)
    with (
        pytest.warns(UserWarning, match="changes which tensors are saved for backward, as checkpoint"),
        fxsplit.compile(Checkpoints(), 2, example_inputs=x, passes=FAST) as pipe,
    ):
        torch.testing.assert_close(pipe(x), pipe.model(x))


@pytest.mark.parametrize("name", ["in", "class", 'a"b', "a\\b"])
def test_a_submodule_that_code_cannot_name_is_named(name: str) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({name: nn.Linear(4, 4)})

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.parts[name](x)
            return result

    with pytest.raises(
        TraceError, match=r"submodule 'parts\..* of Named has a name that torch.fx cannot write into code"
    ):
        fxsplit.compile(Named(), 2, example_inputs=torch.randn(4, 4))
