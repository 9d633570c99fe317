"""A model that is compiled again over ranks, after its weights have moved: trial runs of the model still work."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import FxsplitWarning
from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from tests.support.models import FAST
from tests.support.ranks import ranks

IGNORED = -100


class OwnLoss(nn.Module):
    """Returns its own loss, of one of several kinds. Some labels are ignored."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.scale, self.squared = kind, 1.0, False
        self.embed, self.hidden = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.more, self.head = nn.Linear(8, 8), nn.Linear(8, 20)
        self.register_buffer("classes", torch.linspace(0.5, 4.0, 20))
        self.register_buffer("ignored", torch.tensor(IGNORED))
        self.classes: Tensor
        self.ignored: Tensor

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        if self.kind == "masked by a buffer":
            tokens = tokens * (labels != self.ignored)
        out = self.head(torch.tanh(self.more(torch.tanh(self.hidden(self.embed(tokens)))))) * self.scale
        if self.squared:
            out = out + 0.1 * out.square()
        flat, wanted = out.flatten(0, 1), labels.flatten()
        if self.kind in ("sum", "mean"):
            return F.cross_entropy(flat, wanted, reduction=self.kind)
        if self.kind == "weighted":
            return {"loss": F.cross_entropy(flat, wanted, self.classes), "logits": out}
        if self.kind.startswith("masked"):
            mask = (wanted != (IGNORED if self.kind == "masked" else self.ignored)).double()
            return (F.cross_entropy(flat, wanted, reduction="none") * mask).sum() / mask.sum()
        correct = ((out.argmax(-1) == labels) & (labels != IGNORED)).sum()
        return {"loss": F.cross_entropy(flat, wanted), "correct": correct, "logits": out}


def make_batch(seed: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels; the later a row, the more of its labels are ignored."""
    made = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(20, (rows, length), generator=made) for _ in range(2))
    ignored = torch.rand(rows, length, generator=made) < torch.linspace(0, 0.8, rows)[:, None]
    return tokens, labels.masked_fill(ignored, IGNORED)


SCRIPTS: dict[str, list[tuple[str, dict[str, Any], tuple[int, int]]]] = {
    "evaluated first": [("eval", {}, (12, 6)), ("train", {}, (12, 6)), ("eval", {}, (12, 6)), ("train", {}, (9, 6))],
    "trained first": [("train", {}, (12, 6)), ("eval", {}, (12, 6)), ("train", {}, (12, 6))],
    "annealed": [("eval", {}, (12, 6)), *(("train", {"scale": 1.0 - 0.1 * i}, (12, 6)) for i in range(3))],
    "a flag": [("train", {}, (12, 6)), ("train", {"squared": True}, (12, 6)), ("eval", {}, (12, 6))],
    "other lengths": [("eval", {}, (12, 6)), ("train", {}, (12, 9)), ("eval", {}, (7, 4))],
}


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def build(kind: str, weights: Path | None) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """Return a model, the same one to compare it with, and how to compile it; without weights, if there is a file."""
    torch.manual_seed(0)
    whole = OwnLoss(kind).double()
    if weights is None:
        return copy.deepcopy(whole), whole, {}
    with fxsplit.without_weights():
        model = OwnLoss(kind).double()
    return model, whole, {"weights": weights}


def run_scripts(rank: int, n: int, kind: str, weights: Path | None = None) -> int:
    count = 0
    for script in SCRIPTS.values():
        model, whole, options = build(kind, weights)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, whole)]
        with fxsplit.compile(model, "world", n_microbatches=4, passes=FAST, **options) as pipe:
            for seed, (mode, attributes, shape) in enumerate(script):
                for m in (model, whole):
                    vars(m).update(attributes)
                    # Weights are loaded in the first call.
                    m.get_buffer("classes").mul_(torch.linspace(0.9, 1.2, 20) if seed else 1.0)
                    m.train(mode == "train")
                count += run_step(pipe, whole, optimizers, make_batch(seed, *shape))
            found = pipe.state_dict()
            assert list(found) == list(whole.state_dict())
            assert_close(dict(found), dict(whole.state_dict()))
    return count


def run_step(pipe: Any, whole: nn.Module, optimizers: list[Any], batch: tuple[Tensor, Tensor]) -> int:
    """Train or evaluate both; return how many gradients there were on this rank."""
    if not whole.training:
        with torch.no_grad():
            assert_close(pipe(*batch), whole(*batch))
        return 0
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = pipe.step(*batch)
    outputs = whole(*batch)
    expected = outputs["loss"] if isinstance(outputs, dict) else outputs
    expected.backward()
    assert_close(loss, expected.detach())
    here = [(w, other) for w, other in zip(pipe.parameters(), whole.parameters(), strict=True) if not is_remote(w)]
    for weight, other in here:
        assert_close(weight.grad.as_subclass(Tensor), other.grad)
    for optimizer in optimizers:
        optimizer.step()
    return len(here)


@pytest.mark.parametrize(
    "kind",
    [
        "sum",
        "weighted",
        *(pytest.param(k, marks=pytest.mark.long) for k in ("mean", "masked", "dict", "masked by a buffer")),
    ],
)
def test_own_losses_are_those_of_the_unsplit_model(kind: str) -> None:
    # Seven parameters that train, in each of eleven steps, each on one rank.
    trained = sum(mode == "train" for script in SCRIPTS.values() for mode, _, _ in script)
    assert sum(ranks(2, run_scripts, kind)) == trained * 7


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sum", "masked"])
def test_own_losses_over_three_ranks(kind: str) -> None:
    trained = sum(mode == "train" for script in SCRIPTS.values() for mode, _, _ in script)
    assert sum(ranks(3, run_scripts, kind)) == trained * 7


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "kind", ["sum", *(pytest.param(k, marks=pytest.mark.long) for k in ("mean", "masked", "dict"))]
)
def test_own_losses_of_models_without_weights(kind: str, n: int, tmp_path: Path) -> None:
    """A sum was taken for a mean, in the first compile too; and over ranks no weights could be loaded."""
    whole = build(kind, None)[1]
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    trained = sum(mode == "train" for script in SCRIPTS.values() for mode, _, _ in script)
    assert sum(ranks(n, run_scripts, kind, tmp_path)) == trained * 7


class Centred(nn.Module):
    """Compares the rows of its input, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        found: Tensor = self.last(hidden - hidden.mean(0, keepdim=True) if self.training else hidden)
        return found


def warn_again(rank: int, n: int) -> list[str]:
    x = torch.randn(8, 4)
    with fxsplit.compile(Centred(), "world", n_microbatches=2, passes=FAST) as pipe, torch.no_grad():
        pipe.eval()(x)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            pipe.train()(x)
        assert not any(hasattr(weight, "lent") and weight.lent is not None for weight in pipe.parameters())
    return [str(one.message) for one in told if issubclass(one.category, FxsplitWarning)]


def test_rows_that_depend_on_each_other_are_found_in_the_second_mode() -> None:
    for said in ranks(2, warn_again):
        assert any("the rows of output 0 of Centred depend on each other" in text for text in said), said
