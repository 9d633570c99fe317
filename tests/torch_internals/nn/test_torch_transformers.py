"""torch's own transformers are traced into, layer by layer, under any mask, and are the unsplit model in every mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from tests.support.models import FAST, take_grads

WIDTH, LENGTH = 8, 6
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
OPTIONS: dict[str, Any] = {"passes": FAST, "n_microbatches": 2}


def make_encoder(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, **{"batch_first": True, **options})
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options)


def make_causal(length: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length).double()


class Encodes(nn.Module):
    """An encoder with a mask made in forward(), as in tutorials."""

    def __init__(self, make_mask: Callable[[int], Tensor | None], norm: bool = False, **options: Any) -> None:
        super().__init__()
        self.encoder, self.make_mask, self.head = make_encoder(**options), make_mask, nn.Linear(WIDTH, 3)
        self.encoder.norm = nn.LayerNorm(WIDTH) if norm else None

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        length = x.shape[1 if self.encoder.layers[0].self_attn.batch_first else 0]
        encoded = self.encoder(x, mask=self.make_mask(length), src_key_padding_mask=padding)
        result: Tensor = self.head(encoded)
        return result


class Decodes(nn.Module):
    """A decoder with a mask given as an argument, as for a mask that is made once."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.decoder, self.head = nn.TransformerDecoder(layer, 2), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = self.head(self.decoder(x, memory, tgt_mask=mask))
        return result


class Translates(nn.Module):
    """torch's whole transformer, with the masks of its tutorial on translation."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(WIDTH, 2, 1, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        causal = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), diagonal=1)
        masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        result: Tensor = self.model(source, target, tgt_mask=causal, **masks)
        return result


def draw(rows: int = 4) -> Tensor:
    return torch.randn(rows, LENGTH, WIDTH, dtype=torch.float64)


def pad(*lengths: int) -> Tensor:
    """Return a mask that is True at the padding of rows of these lengths. Negative lengths are padded at the start."""
    places = torch.arange(LENGTH)
    return torch.stack([places >= n if n > 0 else places < LENGTH + n for n in lengths])


def make_none(length: int) -> None:
    return None


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "causal": (lambda: Encodes(make_causal), lambda: (draw(),)),
    "padded at the start": (lambda: Encodes(make_none), lambda: (draw(), pad(6, -3, -4, 2))),
}
MORE: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "packed": (lambda: Encodes(make_none, norm=True), lambda: (draw(), pad(6, 3, 4, 2))),
    "translation": (Translates, lambda: (draw(), draw(), pad(6, 3, 4, 2))),
    "decoder": (Decodes, lambda: (draw(), draw(), make_causal(LENGTH))),
    "sequence first": (lambda: Encodes(make_causal, batch_first=False), lambda: (draw().transpose(0, 1),)),
    "norm first": (lambda: Encodes(make_causal, norm_first=True, norm=True), lambda: (draw(),)),
    "booleans": (lambda: Encodes(lambda n: torch.ones(n, n, dtype=torch.bool).triu(1)), lambda: (draw(),)),
    "window": (lambda: Encodes(lambda n: ~torch.ones(n, n, dtype=torch.bool).triu(-1).tril(1)), lambda: (draw(),)),
    "both": (
        lambda: Encodes(make_causal),
        lambda: (draw(), torch.zeros(4, LENGTH).double().masked_fill(pad(6, 3, 4, 2), -1e9)),
    ),
}


def check(name: str, make: Callable[[], nn.Module], make_example: Callable[[], tuple[Any, ...]]) -> None:
    torch.manual_seed(0)
    model, example = make().double(), make_example()
    unsplit = copy.deepcopy(model)
    chunks: Any = {"sequence first": {"x": 1}, "decoder": {"mask": fxsplit.Replicate}}.get(name)
    with fxsplit.compile(model, ["cpu"] * 2, **OPTIONS, chunks=chunks) as pipe:
        out, expected = pipe(*example), unsplit(*example)
        torch.testing.assert_close(out, expected)
        assert min(len(stage.nodes) for stage in pipe.plan.stages) > 40, "cut in the midst"
        for found in (out, expected):
            found.square().sum().backward()
        torch.testing.assert_close(take_grads(model), take_grads(unsplit))
        pipe.eval()
        unsplit.eval()
        torch.testing.assert_close(pipe(*example), unsplit(*example))
        with torch.no_grad():
            torch.testing.assert_close(pipe(*example), unsplit(*example))
        torch.testing.assert_close(pipe(*example), unsplit(*example))
        compiled = pipe.compiler.get_compiled("eval")
        assert compiled is not None and not compiled.moves_weights


@pytest.mark.parametrize("name", CASES)
def test_layers_are_apart_under_any_mask(name: str) -> None:
    """An encoder with a mask was one node, since torch asks of the mask's values whether it is causal."""
    check(name, *CASES[name])


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_layers_are_apart_under_further_masks(name: str) -> None:
    check(name, *MORE[name])


def test_weights_may_be_missing() -> None:
    with fxsplit.without_weights():
        model = Encodes(make_causal).double()
    pipe = fxsplit.compile(model, ["cpu"] * 2, example_inputs=draw(), passes=FAST)
    assert pipe.front_end == "export" and min(len(stage.nodes) for stage in pipe.plan.stages) > 30
