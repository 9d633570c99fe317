"""Draws replaced by their averages, and batch norms that normalise each row by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxsplit.torch_internals.nn.expectations import expect_averages, normalise_rows_alone


def attend(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of channels": lambda x: F.dropout1d(x[:, None], 0.3),
    "random slopes": lambda x: F.rrelu(x, training=True),
    "made up": lambda x: x + torch.empty_like(x).log_normal_() + torch.empty_like(x).geometric_(0.5),
    "noise": lambda x: x + torch.randn_like(x) * torch.rand_like(x),
    "noise of a shape": lambda x: x + torch.randn(4) + torch.randint(0, 9, (4,)) + torch.randint_like(x, 5),
    "normal": lambda x: torch.normal(x, 1.0) + torch.normal(0.0, torch.ones(4)) + torch.normal(1.0, 2.0, (4,)),
    "in place": lambda x: x + torch.empty(4).uniform_(2, 4) + torch.empty(4).exponential_() + torch.empty(4).normal_(),
    "stochastic depth": lambda x: x * torch.empty(len(x), 1).bernoulli_(0.8).div_(0.8),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.25)),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "permutation": lambda x: x[:, torch.randperm(4)],
    "multinomial": lambda x: torch.multinomial(x.softmax(1), 2) + torch.multinomial(x.softmax(1), 1, replacement=True),
    "attention": lambda x: attend(x[:, None, None]),
    "recurrent": lambda x: nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True).train().double()(x[:, None].double())[0],
}


@pytest.mark.parametrize("name", DRAWS)
def test_rows_do_not_depend_on_draws_and_none_is_made(name: str) -> None:
    x, state = torch.randn(6, 4), torch.get_rng_state()
    call = DRAWS[name]
    found = []
    for rows in (6, 6, 2):
        torch.manual_seed(0)  # the recurrent module recomputes its weights
        with torch.no_grad(), expect_averages():
            if name != "recurrent":
                torch.set_rng_state(state)
            found.append(call(x[:rows]))
        assert name == "recurrent" or torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[0][:2], found[2])


def test_averages() -> None:
    with expect_averages():
        assert torch.equal(F.dropout(torch.ones(3), 0.3), torch.ones(3)), "but for the share that is dropped"
        assert float(torch.rand(())) == 0.5 and int(torch.randint(2, 5, ())) == 3 and float(torch.randn(())) == 0.0
    assert F.dropout(torch.ones(99), 0.9).eq(0).any(), "outside of the block all is as before"


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4, track_running_stats=False)]
)
def test_batch_norms_use_their_own_row(norm: nn.Module) -> None:
    x = torch.randn(6, 4)
    with normalise_rows_alone():
        torch.testing.assert_close(norm(x)[:1], norm(x[:1]))
        norm.eval()
        torch.testing.assert_close(norm(x)[:1], norm(x[:1]))
    torch.testing.assert_close(norm(x), nn.Module.__call__(norm, x))
    assert not any(buffer.any() for name, buffer in norm.named_buffers() if name == "running_mean"), "untouched"
