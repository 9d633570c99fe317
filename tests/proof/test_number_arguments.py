"""Python numbers as arguments that change from call to call, in a loop of the user's and in a step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxsplit
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators
from tests.support.models import FAST, Two, take_grads

OPTIONS: dict[str, Any] = {"passes": FAST, "n_microbatches": 2}


class Takes(Two):
    """Takes a number and a float, and applies `use` to its inner values and both."""

    def __init__(self, use: Callable[[Tensor, Any, float], Tensor], *, exported: bool = False) -> None:
        super().__init__()
        self.use, self.exported = use, exported

    def forward(self, x: Tensor, n: Any = 4, *, rate: float = 1.0) -> Tensor:
        h = self.use(self.a(x), n, rate)
        if self.exported and x.shape[1] > 100:
            h = h * 2
        result: Tensor = self.b(h)
        return result


INPUTS: dict[str, Callable[[Tensor, Any, float], Tensor]] = {
    "divisor": lambda h, n, rate: h / n * rate,
    "shift": lambda h, n, rate: h.roll(n, 1) ** 2 * (1 - rate),
    "length": lambda h, n, rate: torch.cat([h[:, :n] * rate, h[:, n:]], 1),
}


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("kind", INPUTS)
def test_numbers_that_change_are_inputs(kind: str, exported: bool, captured: list[nn.Module]) -> None:
    """Another value used to be refused: compile another pipeline for the other value."""
    model, x = Takes(INPUTS[kind], exported=exported).double(), torch.randn(8, 4, dtype=torch.float64)
    unsplit = copy.deepcopy(model)
    with fxsplit.compile(model, 2, loss_fn=nn.functional.mse_loss, **OPTIONS) as pipe:
        for n, rate in ((4, 1.0), (3, 0.5), (1, 0.25), (2, 2.0), (4, 1.0)):
            for call in ((x, n), {"rate": rate}), ((x,), {"n": n, "rate": rate}):
                out = pipe(*call[0], **call[1])
                torch.testing.assert_close(out, unsplit(*call[0], **call[1]))
            out.square().mean().backward()
            unsplit(x, n, rate=rate).square().mean().backward()
            torch.testing.assert_close(take_grads(model), take_grads(unsplit))
            pipe.step(x, n, rate=rate, target=torch.zeros_like(x))
            unsplit(x, n, rate=rate).square().mean().backward()
            torch.testing.assert_close(take_grads(model), take_grads(unsplit))
        assert len(captured) == 2
        pipe.eval()
        torch.testing.assert_close(pipe(x, 2, rate=7.0), unsplit(x, 2, rate=7.0))
        assert len(captured) == 3, "of the other mode, with inputs as well"


def test_a_number_that_decides_compiles_once_for_each_value(captured: list[nn.Module]) -> None:
    model, x = Takes(lambda h, n, rate: sum((h * i for i in range(n)), h) * rate), torch.randn(8, 4)
    with fxsplit.compile(model, 2, **OPTIONS) as pipe:
        for n in (1, 2, 3):
            if n == 1:
                pipe(x, n)
            else:
                with pytest.warns(fxsplit.FxsplitWarning, match="because argument 'n' changed .*as a tensor") as said:
                    torch.testing.assert_close(pipe(x, n), model(x, n))
                assert said[0].filename == __file__
        assert len(captured) == 3
        for n in (1, 3, 2, 1):  # no warning, as warnings are errors here
            torch.testing.assert_close(pipe(x, n), model(x, n))
        assert len(captured) == 3
        torch.testing.assert_close(pipe(x, 1, rate=0.5), model(x, 1, rate=0.5))
        torch.testing.assert_close(pipe(x, 1, rate=0.25), model(x, 1, rate=0.25))
        assert len(captured) == 4, "the other number is an input"


def test_other_kinds_of_values_are_other_ways_of_calling() -> None:
    model, x = Takes(lambda h, n, rate: h * n), torch.randn(8, 4)
    with fxsplit.compile(model, 2, **OPTIONS) as pipe:
        for n in (2, 3):
            torch.testing.assert_close(pipe(x, n), model(x, n))
        torch.testing.assert_close(pipe(x, True), model(x, True))
        for odd in (None, "3"):
            with pytest.raises(TypeError):
                pipe(x, odd)
        for value in (1.5, 2, 2.5):  # an int and a float are numbers of two graphs
            torch.testing.assert_close(pipe(x, value), model(x, value))


def test_a_graph_that_was_given_takes_numbers(captured: list[nn.Module]) -> None:
    graph = fx.Graph()
    x, n = graph.placeholder("x"), graph.placeholder("n", default_value=2)
    graph.output(graph.call_module("b", (graph.call_function(torch.mul, (graph.call_module("a", (x,)), n)),)))
    model = fx.GraphModule(Two(), graph)
    rows = torch.randn(8, 4)
    with fxsplit.compile(model, 2, **OPTIONS) as pipe:
        for value in (2, 5, 7):
            torch.testing.assert_close(pipe(rows, value), model(rows, value))
        assert len(captured) == 2


def make_gpt2(transformers: Any) -> Any:
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, **rates, use_cache=False, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def make_llama(transformers: Any) -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64, "max_position_embeddings": 16}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False))


@pytest.mark.parametrize("kind", [int, torch.tensor])
@pytest.mark.parametrize("make", [make_gpt2, make_llama])
@pytest.mark.long  # in the environment that has transformers
def test_num_items_in_batch(make: Callable[[Any], Any], kind: Any, captured: list[nn.Module]) -> None:
    """Hugging Face's Trainer passes a new number for each batch: the loss is a sum divided by it."""
    declare_detection_operators()
    model = make(pytest.importorskip("transformers")).double()
    unsplit, ids = copy.deepcopy(model), torch.randint(0, 64, (4, 8))
    with fxsplit.compile(model, 2, **OPTIONS) as pipe:
        for count in (28, 35, 10):
            call: dict[str, Any] = {"labels": ids, "num_items_in_batch": kind(count)}
            expected = unsplit(ids, **call).loss
            expected.backward()
            wanted = take_grads(unsplit)
            torch.testing.assert_close(pipe.step(ids, **call), expected)
            torch.testing.assert_close(take_grads(model), wanted)
            pipe(ids, **call).loss.backward()
            torch.testing.assert_close(take_grads(model), wanted)
        assert len(captured) == (2 if kind is int else 1)
        if kind is int:
            assert fxsplit.verify(pipe, (ids,), {"labels": ids, "num_items_in_batch": 9}).equal
