"""Outputs of a model: in the same containers, joined along their rows, and refused if they cannot be joined."""

from __future__ import annotations

import operator
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import InputError, TraceError
from fxsplit.frontend.check.outputs import unpack_output
from tests.support.models import FAST, Mlp, Two

mse = F.mse_loss


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return OrderedDict(out=self.b(h), aux=(h,))


def test_an_ordered_dict_is_returned_as_one() -> None:
    model = Named()
    x = vectors()
    with fxsplit.compile(model, 2, example_inputs=x, loss_fn=lambda o, t: mse(o["out"], t), passes=FAST) as pipe:
        found, wanted = pipe(x), model(x)
        assert type(found) is OrderedDict and list(found) == ["out", "aux"]
        torch.testing.assert_close(found["aux"][0], wanted["aux"][0])
        _, outputs = pipe.step(x, target=torch.zeros(8, 3), return_outputs=True)
        assert type(outputs) is OrderedDict


class DropsRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.tanh(self.a(x))).mean(dim=0, keepdim=True)
        return result


def test_one_row_does_not_hide_an_output_that_is_no_batch() -> None:
    """Of one row a mean looks like a row, and once was joined as one, or refused."""
    model = DropsRows()
    for rows, count in ((4, 4), (2, 2), (1, None)):
        with fxsplit.compile(model, 2, example_inputs=vectors(rows), n_microbatches=count, passes=FAST) as pipe:
            x = vectors(6)
            torch.testing.assert_close(pipe(x), model(x))


class Compares(nn.Module):
    """Every row with every other, as CLIP does; a list of numbers, and one for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        similar = torch.tanh(self.a(x)) @ torch.tanh(self.b(y)).T
        return similar, similar.mean(0, keepdim=True)[:, :2], self.a(x)


def test_rows_that_depend_on_each_other_stay_in_one_microbatch() -> None:
    x, y = vectors(6), vectors(6)
    with (
        fxsplit.compile(Compares(), 2, example_inputs=(x, y), n_microbatches=2, passes=FAST) as pipe,
        pytest.raises(InputError, match=r"output 0 of Compares is of shape \(6, 6\) for 6 rows.*n_microbatches=1"),
    ):
        pipe(x, y)
    model = Compares()
    options: Any = {"passes": FAST, "loss_fn": lambda out, target: (out[0] - target).square().mean()}
    with fxsplit.compile(model, 2, example_inputs=(x, y), n_microbatches=1, **options) as pipe:
        assert fxsplit.verify(pipe, (x, y)).equal
        for rows in (6, 4):
            for a, b in zip(pipe(x[:rows], y[:rows]), model(x[:rows], y[:rows]), strict=True):
                torch.testing.assert_close(a, b)
        sum(out.square().sum() for out in pipe(x, y)).backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        sum(out.square().sum() for out in model(x, y)).backward()
        torch.testing.assert_close(found, [p.grad for p in model.parameters()])
        assert pipe.step(x, y, target=torch.eye(6)).isfinite()
    pipe = fxsplit.compile(model, 1, example_inputs=(x[:1], y[:1]), **options)
    with pipe, pytest.raises(InputError, match=r"it does not have one row for each row.*n_microbatches=1"):
        pipe(torch.cat([x] * 3), torch.cat([y] * 3))


class Known(dict[str, Any]):
    pass


@pytest.mark.parametrize("count", [1, 2])
def test_a_container_of_the_users_own_is_refused(count: int) -> None:
    class Returns(Mlp):
        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            return Known((str(i), out) for i in range(count))

    with pytest.raises(TraceError, match="returns a Known, which torch's pytrees do not know"):
        fxsplit.compile(Returns(), 2, example_inputs=vectors())


class Fields(NamedTuple):
    logits: Any
    loss: Any = None


def test_a_field_that_is_none() -> None:
    class Returns(Mlp):
        def forward(self, x: Tensor) -> Any:
            return Fields(super().forward(x))

    model = Returns()
    x = vectors()
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        found = pipe(x)
        assert type(found) is Fields and found.loss is None
        torch.testing.assert_close(found.logits, model(x).logits)


OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 4)


def test_an_output_as_long_as_a_microbatch_is_no_batch() -> None:
    """Once an output that happens to be as long as a microbatch was joined as if it had rows, and later refused."""

    class Positions(Two):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.b(self.a(x)), self.positions * 2

    model = Positions()
    with fxsplit.compile(model, 2, example_inputs=rows(), **OPTIONS) as pipe:
        assert torch.equal(pipe(rows())[1], model.positions * 2) and fxsplit.verify(pipe, rows()).equal


def test_a_node_of_several_tensors_is_unpacked() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.sort, (graph.placeholder("x"),))
    graph.output({"sorted": node, "none": None})
    gm = fx.GraphModule({}, graph)
    x = torch.tensor([[2.0, 1.0]])
    value = gm(x)
    unpack_output(gm, {"sorted": tuple(value["sorted"]), "none": None})
    assert type(gm(x)["sorted"]) is not type(value["sorted"]) and torch.equal(
        gm(x)["sorted"][1], torch.tensor([[1, 0]])
    )
    items = [n for n in gm.graph.nodes if n.target is operator.getitem]
    assert [n.meta["fxsplit_shape"] for n in items] == ["float32[1, 2]", "int64[1, 2]"]


class Several(nn.Module):
    """Flattened logits, a norm over all rows, a code book that is a parameter, and how many numbers are positive."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.book = nn.Linear(4, 8), nn.Linear(8, 6), nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.b(torch.tanh(self.a(x)))
        return h.reshape(-1, 3), h.norm(), self.book * 2, (h > 0).sum()


def loss_of_several(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    logits, norm, book, count = outputs
    return mse(logits.reshape(target.shape), target) + norm + (book.sum() * count) / 100


def test_a_step_joins_no_outputs() -> None:
    """Such outputs used to be refused at compile time, even if only the loss of each microbatch reads them."""
    model, x, target = Several().double(), rows().double(), torch.randn(8, 6).double()
    options: Any = {"loss_fn": loss_of_several, **OPTIONS}
    with fxsplit.compile(model, 2, example_inputs=x, **options) as pipe:
        with pytest.warns(
            fxsplit.FxsplitWarning, match=r"it reads what microbatches do not make \(output 1 of Several"
        ):
            found = pipe.step(x, target=target)
        got = [weight.grad for weight in model.parameters()]
        model.zero_grad()
        first, second = [loss_of_several(model(part), t) for part, t in zip(x.chunk(2), target.chunk(2), strict=True)]
        ((first + second) / 2).backward()
        torch.testing.assert_close(found, ((first + second) / 2).detach())
        for gradient, weight in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, weight.grad, rtol=0, atol=1e-12)
        with pytest.raises(InputError, match=r"output 1 of Several is .*n_microbatches=1"):
            pipe(x)
