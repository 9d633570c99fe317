"""Typical training scripts with the one line changed print the same as with the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators
from tests.support.models import FAST
from tests.support.text_models import make_text_model

STEPS = 3
Loop = Callable[[Any], list[float]]
"""Trains a model, or its pipeline, and evaluates it; returns everything that it prints."""


def compare(model: nn.Module, loop: Loop, **options: Any) -> None:
    unsplit = copy.deepcopy(model)
    with fxsplit.compile(model, ["cpu"] * 2, **{"passes": FAST, "n_microbatches": 2, **options}) as pipe:
        printed = []
        for each in (unsplit, pipe):
            torch.manual_seed(1)
            printed.append(loop(each))
    torch.testing.assert_close(printed[1], printed[0], rtol=1e-8, atol=1e-10)


def train(model: Any, compute_loss: Callable[[int], Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    printed = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = compute_loss(step)
        loss.backward()
        optimizer.step()
        printed.append(float(loss.detach()))
    return printed


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.norm_2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.size()
        parts = self.qkv(self.norm(x)).split(width, dim=2)
        q, k, v = (p.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).contiguous().view(rows, length, width))
        result: Tensor = x + self.mlp(self.norm_2(x))
        return result


class Writer(nn.Module):
    """Returns (logits, loss) if targets are given; without them, only the logits of the last place."""

    def __init__(self, words: int = 40, length: int = 12, width: int = 16) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, 2) for _ in range(2))
        self.norm, self.head, self.length = nn.LayerNorm(width), nn.Linear(width, words, bias=False), length
        self.embed.weight = self.head.weight

    def forward(self, words: Tensor, targets: Tensor | None = None) -> Any:
        length = words.size(1)
        assert length <= self.length, "too long"
        x = self.embed(words) + self.places(torch.arange(length, device=words.device))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    @staticmethod
    def sample(model: Any, words: Tensor, count: int) -> Tensor:
        for _ in range(count):
            logits, _ = model(words[:, -12:])
            words = torch.cat([words, logits[:, -1].argmax(-1, keepdim=True)], 1)
        return words


def test_a_language_model_trains_and_samples() -> None:
    torch.manual_seed(0)
    words, targets = (torch.randint(40, (4, 12)) for _ in range(2))

    def loop(model: Any) -> list[float]:
        printed = train(model, lambda step: model(words, targets)[1])
        with torch.no_grad():
            return [*printed, *Writer.sample(model.eval(), words[:2, :10], 4).flatten().tolist()]

    compare(Writer().double(), loop)


class Recurrent(nn.Module):
    """A recurrent language model that carries its states from batch to batch."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(30, 8), kind(8, 8, 2), nn.Linear(8, 30)

    def forward(self, words: Tensor, states: Any) -> Any:
        output, states = self.rnn(self.embed(words), states)
        return F.log_softmax(self.head(output), dim=-1), states


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_states_go_from_batch_to_batch(kind: Any) -> None:
    torch.manual_seed(0)
    words, targets = (torch.randint(30, (5, 8)) for _ in range(2))
    zeros = torch.zeros(2, 8, 8, dtype=torch.float64)

    def loop(model: Any) -> list[float]:
        states: Any = (zeros, zeros) if kind is nn.LSTM else zeros

        def compute_loss(step: int) -> Tensor:
            nonlocal states
            output, states = model(words, states)
            states = tuple(s.detach() for s in states) if kind is nn.LSTM else states.detach()
            return F.nll_loss(output.flatten(0, 1), targets.flatten())

        return train(model, compute_loss)

    compare(Recurrent(kind).double(), loop, chunks={"words": 1, "states": 1})


class Translator(nn.Module):
    def __init__(self, words: int = 20, width: int = 8) -> None:
        super().__init__()
        self.model = nn.Transformer(width, 2, 1, 2, 16, dropout=0.0, batch_first=True)
        self.source, self.target, self.head = (
            nn.Embedding(words, width),
            nn.Embedding(words, width),
            nn.Linear(width, words),
        )

    def forward(self, source: Tensor, target: Tensor, mask: Tensor, padding: Tensor, target_padding: Tensor) -> Tensor:
        masks = {"tgt_key_padding_mask": target_padding, "memory_key_padding_mask": padding}
        out = self.model(self.source(source), self.target(target), None, mask, None, padding, **masks)
        result: Tensor = self.head(out)
        return result


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_translation_is_made_word_by_word() -> None:
    torch.manual_seed(0)
    source, target = torch.randint(1, 20, (4, 6)), torch.randint(1, 20, (4, 5))
    source[::2, 4:], target[1::2, 3:] = 0, 0
    make_mask = nn.Transformer.generate_square_subsequent_mask

    def loop(model: Any) -> list[float]:
        def run(given: Tensor) -> Tensor:
            mask = make_mask(given.shape[1]) < 0
            result: Tensor = model(source, given, mask, source == 0, given == 0)
            return result

        def compute_loss(step: int) -> Tensor:
            return F.cross_entropy(run(target[:, :-1]).flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)

        printed, words = train(model, compute_loss), torch.ones(4, 1, dtype=torch.long)
        with torch.no_grad():
            model.eval()
            for _ in range(3):
                words = torch.cat([words, run(words)[:, -1].argmax(-1, keepdim=True)], 1)
        return [*printed, *words.flatten().tolist()]

    compare(Translator().double(), loop, chunks={"mask": fxsplit.Replicate})


class Towers(nn.Module):
    """Two towers; a call uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.scale = (
            nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 8)),
            nn.Parameter(torch.ones([])),
        )
        self.embed, self.text = nn.Embedding(20, 8), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> Any:
        found = None if image is None else F.normalize(self.image(image), dim=-1)
        words = None if text is None else F.normalize(self.text(self.embed(text).mean(1)), dim=-1)
        if found is None or words is None:
            return words if found is None else found
        return found, words, self.scale.exp()


def test_two_towers_are_trained_together_and_asked_alone() -> None:
    torch.manual_seed(0)
    image, text = torch.randn(8, 3, 4, 4, dtype=torch.float64), torch.randint(20, (8, 5))

    def loop(model: Any) -> list[float]:
        def compute_loss(step: int) -> Tensor:
            found, words, scale = model(image, text)
            logits, places = scale * found @ words.T, torch.arange(8)
            return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2

        printed = train(model, compute_loss)
        with torch.no_grad():
            model.eval()
            return [*printed, float(model(image=image).sum()), float(model(text=text).sum())]

    compare(Towers().double(), loop)


class Tasks(nn.Module):
    """One body with several heads; a text names the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.heads = nn.ModuleDict({"kind": nn.Linear(16, 3), "size": nn.Linear(16, 3)})

    def forward(self, x: Tensor, task: str = "kind", features: bool = False) -> Tensor:
        h: Tensor = self.body(x)
        return h if features else self.heads[task](h)


def test_a_text_says_which_head() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randint(3, (8,))

    def loop(model: Any) -> list[float]:
        printed = train(model, lambda step: F.cross_entropy(model(x, ("kind", "size")[step % 2]), y))
        return [*printed, float(model(x, features=True).detach().sum())]

    compare(Tasks().double(), loop)


@pytest.mark.long
def test_hugging_faces_models_with_labels_and_without() -> None:
    declare_detection_operators()
    model = make_text_model("gpt2")
    for dropout in (m for m in model.modules() if isinstance(m, nn.Dropout)):
        dropout.p = 0.0
    words = torch.randint(2, 90, (4, 8))
    mask = torch.ones_like(words)

    def loop(model: Any) -> list[float]:
        ways: list[dict[str, Any]] = [{"labels": words}, {"labels": words, "attention_mask": mask}]
        printed = train(model, lambda step: model(input_ids=words, **ways[step % 2]).loss)
        with torch.no_grad():
            model.eval()
            written = model.generate(words[:, :5], attention_mask=mask[:, :5], max_new_tokens=4, do_sample=False)
            return [*printed, *written.flatten().tolist(), float(model(input_ids=words, labels=words).loss)]

    with pytest.warns(fxsplit.FxsplitWarning, match="past_key_values"):
        compare(model.train(), loop)
