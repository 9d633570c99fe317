"""Evaluation under inference mode over ranks: tensors made in it can be trained, sent and loaded afterwards."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from tests.support.models import FAST
from tests.support.ranks import ranks


class Net(nn.Module):
    """Two layers share a weight, a buffer is read, and a number is annealed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.more, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.more.weight = self.hidden.weight
        self.register_buffer("means", torch.ones(4))
        self.means: Tensor
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.more(self.hidden(torch.tanh(self.first(x)))))
        found: Tensor = self.last(hidden * self.means) * self.scale
        return found


class Pair:
    """A pipeline that has not compiled yet, and the same model unsplit, each with an optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net().double()
        self.whole = copy.deepcopy(self.model)
        self.x, self.y = torch.randn(8, 4).double(), torch.randint(4, (8,))
        self.pipe = fxsplit.compile(self.model, "world", n_microbatches=2, loss_fn=F.cross_entropy, passes=FAST)
        self.optimizers = [torch.optim.Adam(m.parameters(), eps=1e-3) for m in (self.pipe, self.whole)]

    def train(self) -> None:
        self.pipe.train()
        self.whole.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss, wanted = self.pipe.step(self.x, target=self.y), F.cross_entropy(self.whole(self.x), self.y)
        wanted.backward()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-10, atol=1e-12)
        for optimizer in self.optimizers:
            optimizer.step()
        torch.testing.assert_close(dict(self.pipe.state_dict()), dict(self.whole.state_dict()), rtol=1e-10, atol=1e-12)

    def evaluate(self, x: Tensor) -> None:
        self.pipe.eval()
        self.whole.eval()
        torch.testing.assert_close(self.pipe(x), self.whole(x), rtol=1e-10, atol=1e-12)


def evaluate_and_train(rank: int, n: int, folder: Path) -> None:
    """Run each collective operation under inference mode, and train after each."""
    pair = Pair()
    with torch.inference_mode():
        pair.evaluate(pair.x)
    pair.train()
    pair.model.scale = pair.whole.scale = 0.5
    with torch.inference_mode():
        pair.evaluate(pair.x)
        pair.evaluate(pair.x[:5])
        (found,) = pair.pipe.stream([pair.x])
        torch.testing.assert_close(found, pair.whole(pair.x))
    pair.train()
    with torch.inference_mode():
        pair.pipe.load_state_dict(pair.pipe.state_dict())
        pair.pipe.save_weights(folder / "weights")
        pair.pipe.load_weights(folder / "weights")
        fxsplit.save_checkpoint(folder, pair.pipe, pair.optimizers[0], step=1).wait()
        fxsplit.load_checkpoint(folder, pair.pipe, pair.optimizers[0])
        assert fxsplit.verify(pair.pipe, pair.x, target=pair.y).equal
    pair.train()


def test_what_is_made_under_inference_mode_is_trained_afterwards(tmp_path: Path) -> None:
    assert ranks(2, evaluate_and_train, tmp_path) == [None, None]


def test_verify_and_load_in_one_process_whatever_mode_the_caller_is_in(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    with fxsplit.compile(model, ["cpu"] * 2, n_microbatches=2, example_inputs=x, passes=FAST) as pipe:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert fxsplit.verify(pipe, x).equal
        pipe(x).sum().backward()
        optimizer.step()
        fxsplit.save_checkpoint(tmp_path, pipe, optimizer, step=1).wait()
        with torch.inference_mode():
            fxsplit.load_checkpoint(tmp_path, pipe, optimizer)
        # In inference mode the counts of steps that were loaded could not be added to.
        optimizer.step()
    assert not any(value.is_inference() for value in optimizer.state[next(model.parameters())].values())
