"""Submodules that stay whole in a graph that torch.export makes: stated, or because nothing can follow them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import TraceError
from tests.support.models import FAST

OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


@dataclass
class Found:
    """The output of a user's submodule."""

    hidden: Tensor
    score: Tensor
    note: str = "as it is"
    more: dict[str, Tensor] | None = None


class Decides(nn.Module):
    """Decides Python's flow by values, which no front end follows; counts in a buffer, and returns a dataclass."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: Tensor, gain: float, *, parts: dict[str, Any]) -> Found:
        if self.training:
            self.count.add_(1)
        h = self.linear(x) * gain + parts["shift"]
        if h.sum() > 1e6:
            h = -h
        return Found(h, h.mean(1), more={"twice": h.repeat_interleave(2, 0)})


class Around(nn.Module):
    """Decides by shapes, which only torch.export can follow, and calls one submodule twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.inner, self.b = nn.Linear(8, 8), Decides(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 4:
            x = self.a(x)
        first = self.inner(x, 2.0, parts={"shift": x[:, :1], "kept": None})
        again = self.inner(first.hidden.tanh(), 0.5, parts={"shift": x[:, 1:2], "kept": None})
        assert again.note == "as it is" and again.more is not None
        out: Tensor = self.b(again.hidden + again.more["twice"][::2]) * first.score[:, None]
        return out


class Asks(nn.Module):
    """Reads a value, and passes a decision based on it to a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        some = (x > 3).any().item()
        for layer in self.layers:
            x = layer(x, some)
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, some: bool) -> Tensor:
        out: Tensor = self.linear(x)
        return -out if some else out


class Top(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.asks, self.last = nn.Linear(8, 8), Asks(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.asks(self.first(x if x.shape[1] == 8 else x[:, :8])))
        return out


def test_what_cannot_be_followed_stays_whole_and_the_rest_is_exported() -> None:
    model, x = Around(), torch.randn(6, 8)
    said = pytest.warns(UserWarning, match=r"'inner' of Around stays whole.*test_whole_modules.py:\d+")
    with said, fxsplit.compile(model, 2, example_inputs=x, **OPTIONS) as pipe:
        assert pipe.front_end == "export, with submodules kept whole"
        assert fxsplit.verify(pipe, x).equal
        assert fxsplit.verify(pipe, torch.randn(10, 8)).equal, "other numbers of rows"
        calls = [n.target for n in pipe.traced.gm.graph.nodes if n.op == "call_module"]
        assert calls == ["inner", "inner"], "one module, called twice"
        assert len(pipe.costs.nodes) > 6
        seen: list[tuple[int, ...]] = []
        model.inner.register_forward_hook(lambda module, args, out: seen.append(tuple(args[0].shape)))
        torch.testing.assert_close(pipe(x), torch.cat([model(x[:3]), model(x[3:])]))
        assert seen == [(3, 8)] * 8, "hooks run: twice a microbatch in the pipeline, and in the model"
        pipe.eval()
        before = model.inner.count.clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(pipe(x), model(x))
        assert torch.equal(before, model.inner.count)


def test_stated_leaves_stay_whole_in_an_exported_graph() -> None:
    model, x = Around(), torch.randn(6, 8)
    passes = "leaf{path=inner}," + FAST
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=passes) as pipe:
        assert pipe.front_end == "export"
        assert fxsplit.verify(pipe, x).equal
    passes = "leaf{path=b},leaf{path=inner}," + FAST
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=passes) as pipe:
        calls = [n.target for n in pipe.traced.gm.graph.nodes if n.op == "call_module"]
        assert calls == ["inner", "inner", "b"]
        assert fxsplit.verify(pipe, x).equal


def test_the_module_around_stays_whole_where_one_inside_cannot_be_called() -> None:
    """The layer gets a decision based on a value, so only the module that reads the value can call it."""
    x = torch.randn(6, 8)
    said = pytest.warns(UserWarning, match="'asks' of Top stays whole")
    with said, fxsplit.compile(Top(), 2, example_inputs=x, **OPTIONS) as pipe:
        calls = [n.target for n in pipe.traced.gm.graph.nodes if n.op == "call_module"]
        assert calls == ["asks"] and fxsplit.verify(pipe, x).equal


def test_a_length_that_hangs_on_values() -> None:
    class Selects(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x[:, 0] > 0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.inner, self.b = nn.Linear(8, 8), Selects(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            rows = x if x.shape[1] == 8 else x[:, :8]
            kept = self.inner(rows)
            out: Tensor = self.b(self.a(rows)) * kept.sum()
            return out

    x = torch.arange(48.0).reshape(6, 8) - 9
    with pytest.raises(TraceError, match="that do not depend on values"):
        fxsplit.compile(Model(), 2, example_inputs=x, passes="leaf{path=inner}," + FAST, n_microbatches=2)


class Beside(nn.Module):
    """Calls a submodule and a block that torch.export follows and symbolic tracing does not."""

    def __init__(self, inner: nn.Module, call: Any) -> None:
        super().__init__()
        self.a, self.inner, self.b, self.call = nn.Linear(8, 8), inner, nn.Linear(8, 8), call

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            nothing = x * 0
        out: Tensor = self.b(self.call(self.inner, self.a(x) + nothing))
        return out


class Counts(nn.Module):
    """Returns the number of rows in addition to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        if x.sum().item() > 1e9:
            x = x + 1
        return self.linear(x), x.shape[0]


class Heads(nn.Module):
    """Returns a transposed tensor, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).view(x.shape[0], 2, 4).transpose(1, 2)
        return out


@dataclass
class Pair:
    one: Tensor
    two: Tensor


class Adds(nn.Module):
    def forward(self, pair: Pair) -> Tensor:
        return pair.one + pair.two


def in_a_block(inner: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        out: Tensor = inner(h)
    return out


WHOLE = "leaf{path=inner}," + FAST


def test_a_number_that_hangs_on_the_rows_is_no_constant() -> None:
    """Of an earlier batch it would be wrong for every other one: nothing around `inner` can take it along."""

    def share(inner: Any, h: Tensor) -> Tensor:
        out, rows = inner(h)
        result: Tensor = out / rows
        return result

    with pytest.raises(TraceError, match=r"'inner' returns 3 for 3 rows and 6 for twice as many"):
        fxsplit.compile(Beside(Counts(), share), 2, example_inputs=torch.randn(6, 8), n_microbatches=2, passes=WHOLE)


def test_strides_of_what_a_submodule_returns_are_kept() -> None:
    model = Beside(Heads(), lambda inner, h: inner(h).contiguous().view(h.shape[0], 8))
    x = torch.randn(6, 8)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=WHOLE) as pipe:
        assert pipe.front_end == "export" and fxsplit.verify(pipe, x).equal


@pytest.mark.parametrize(
    ("inner", "call", "match"),
    [
        (nn.Linear(8, 8), in_a_block, "called in a block of autocast"),
        (nn.Linear(8, 8), lambda inner, h: torch.stack([inner(row) for row in h]), "is called 3 times for 3 rows"),
        (nn.Sequential(nn.Linear(8, 8)), lambda inner, h: inner.forward(h), r"or by inner.forward\(\)"),
        (Adds(), lambda inner, h: inner(Pair(h, h * 2)), "called with a Pair, which a graph cannot hand to it"),
    ],
)
def test_calls_that_a_graph_cannot_hold_are_refused(inner: nn.Module, call: Any, match: str) -> None:
    with pytest.raises(TraceError, match=match):
        fxsplit.compile(Beside(inner, call), 2, example_inputs=torch.randn(6, 8), n_microbatches=2, passes=WHOLE)


def test_a_leaf_that_one_mode_does_without() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.aux, self.b = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            out: Tensor = self.b(h + self.aux(h) if self.training else h)
            return out

    model, x = Model(), torch.randn(6, 8)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes="leaf{path=aux}," + FAST) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        torch.testing.assert_close(pipe.eval()(x), model(x))


def test_a_function_may_write_to_a_list_of_its_own() -> None:
    """As torchvision's Swin3D does with its windows: a graph's own lists cannot be written to."""
    model, x = Windows(), torch.randn(6, 8)
    with fxsplit.compile(model, 2, example_inputs=x, **OPTIONS) as pipe:
        assert fxsplit.verify(pipe, x).equal


@torch.fx.wrap
def shifted(x: Tensor, shifts: list[int]) -> Tensor:
    shifts[0] = 0
    return x + sum(shifts)


class Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(shifted(self.a(x), [1, 2]))
        return out
