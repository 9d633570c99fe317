"""What a model returns: the same containers, batches joined on their rows, and nothing that cannot be joined."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import InputError, TraceError
from tests.models import FAST, Mlp

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
    for rows, count in ((4, 4), (2, 2)):
        with pytest.raises(InputError, match=r"has shape \(1, 3\) for 1 rows.*n_microbatches=1"):
            fxsplit.compile(DropsRows(), 2, example_inputs=vectors(rows), n_microbatches=count, passes=FAST)


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
    with pytest.raises(InputError, match=r"output 1 of Compares has shape \(1, 2\).*n_microbatches=1"):
        fxsplit.compile(Compares(), 2, example_inputs=(x, y), n_microbatches=2, passes=FAST)
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
    with pipe, pytest.raises(InputError, match=r"output 0 is not one row for each row.*n_microbatches=1"):
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


class Two(nn.Module):
    """Two layers; `narrow` sends a model to torch.export, since it decides by a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def narrow(self, x: Tensor) -> None:
        if x.shape[-1] != 4:
            raise ValueError("four features")


def test_an_output_as_long_as_a_microbatch_is_no_batch() -> None:
    class Positions(Two):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.b(self.a(x)), self.positions * 2

    with pytest.raises(InputError, match=r"output 1 of Positions has shape \(4, 6\) for 4 rows"):
        fxsplit.compile(Positions(), 2, example_inputs=rows(), **OPTIONS)
