"""Recurrent modules become one node per layer; their weights are flattened and always current."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

import fxsplit
from fxsplit.errors import TraceError
from fxsplit.torch_internals.nn.recurrent import flatten_weights
from tests.support.models import FAST, take_grads


@pytest.mark.parametrize(("device", "expected"), [("meta", 1), ("cpu", 0)])
def test_scattered_weights_on_an_accelerator_are_laid_in_one_piece(
    device: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[nn.Module] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2), nn.ReLU()).to(device)
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda self: calls.append(self))
    flatten_weights(model.modules())
    assert calls == [model[1]] * expected


def test_weights_in_one_piece_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph may be alive that has kept them."""
    calls: list[nn.Module] = []
    layer = nn.LSTM(2, 2).to("meta")
    memory = torch.empty(1000, device="meta")
    for weight in layer.parameters():
        weight.data = memory[: weight.numel()].view_as(weight)
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda self: calls.append(self))
    flatten_weights([layer])
    assert not calls


def test_a_layer_is_flattened_with_the_weights_that_it_has_now() -> None:
    """The layer's list of weights is stale after a replica's weights have been put in."""
    layer, other = nn.LSTM(2, 2), nn.LSTM(2, 2)
    layer._parameters.update(other._parameters)
    flatten_weights([layer])
    assert all(mine is its for mine, its in zip(layer._flat_weights, other.parameters(), strict=True))


class Reads(nn.Module):
    """A recurrent module with several layers, and a head. `read` selects the result that is used."""

    def __init__(self, module: nn.Module, read: str = "output", exported: bool = False) -> None:
        super().__init__()
        self.module, self.read, self.exported = module, read, exported
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor, *begin: Tensor) -> Any:
        if self.exported and x.shape[1] > 100:
            x = x * 2
        given = begin if isinstance(self.module, nn.LSTM) else next(iter(begin), None)
        output, ends = self.module(x, given or None) if isinstance(given, tuple) else self.module(x, given)
        if self.read == "end":
            return self.head((ends[0] if isinstance(ends, tuple) else ends)[-1])
        return (self.head(output), ends) if self.read == "all" else self.head(output)


KINDS: dict[str, tuple[Any, dict[str, Any], str, bool]] = {
    "lstm": (nn.LSTM, {}, "output", False),
    "both directions": (nn.GRU, {"bidirectional": True}, "all", False),
    "projected": (nn.LSTM, {"bidirectional": True, "proj_size": 2}, "all", False),
    "no biases": (nn.RNN, {"bias": False, "nonlinearity": "relu"}, "end", False),
    "exported": (nn.LSTM, {}, "output", True),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_is_a_node_with_the_weights_that_the_module_has(name: str) -> None:
    kind, options, read, exported = KINDS[name]
    torch.manual_seed(0)
    model = Reads(kind(4, 4, 3, batch_first=True, **options), read, exported).double()
    x = torch.randn(8, 5, 4, dtype=torch.float64)
    model(x)
    unsplit, keys = copy.deepcopy(model), list(model.state_dict())
    with fxsplit.compile(model, ["cpu"] * 2, passes=FAST, n_microbatches=2) as pipe:
        found, expected = pipe(x), unsplit(x)
        torch.testing.assert_close(found, expected)
        for returned in (found, expected):
            sum((t.square().sum() for t in tree_leaves(returned)), torch.zeros(())).backward()
        torch.testing.assert_close(take_grads(model), take_grads(unsplit))
        held = [{n.partition(".")[2] for n, _ in stage.module.named_parameters()} for stage in pipe.stages.stages]
        assert all(any(name.startswith("weight_ih") for name in names) for names in held), "cut between two layers"
        assert list(pipe.state_dict()) == keys
        pipe.eval()
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), unsplit.eval()(x))


def test_states_at_the_start_and_a_length_first() -> None:
    torch.manual_seed(0)
    model = Reads(nn.LSTM(4, 4, 2, dropout=0.5), "all").double()
    x, h = torch.randn(5, 8, 4, dtype=torch.float64), torch.randn(2, 8, 4, dtype=torch.float64)
    model(x)
    with fxsplit.compile(model, ["cpu"] * 2, passes=FAST, n_microbatches=2, chunks={"x": 1, "begin": 1}) as pipe:
        pipe(x, h, h)
        assert fxsplit.verify(pipe, (x, h, h)).equal
        model.eval()
        torch.testing.assert_close(pipe(x, h, h), model(x, h, h))
        torch.testing.assert_close(pipe(x), model(x))


def test_dropout_between_layers_is_drawn_for_each_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Takes(nn.GRU(4, 4, 2, batch_first=True, dropout=0.5)))
    x = torch.randn(64, 5, 4)
    with fxsplit.compile(model, ["cpu"] * 2, passes=FAST, n_microbatches=2) as pipe:
        assert not torch.equal(pipe(x), pipe(x))
        pipe.eval()
        torch.testing.assert_close(pipe(x), model(x))


class Takes(nn.Module):
    """Returns only the output of a recurrent module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        module: Any = self.module
        module.flatten_parameters()
        return module(x)[0]


def test_modules_with_hooks_or_computed_weights_stay_whole() -> None:
    x = torch.randn(8, 5, 4)
    hooked = nn.LSTM(4, 4, 2, batch_first=True)
    hooked.register_forward_hook(lambda *_: None)
    normed = nn.utils.parametrizations.weight_norm(nn.LSTM(4, 4, 2, batch_first=True), "weight_hh_l0")
    for module in (hooked, normed):
        model = nn.Sequential(Takes(module), nn.Linear(4, 4))
        with fxsplit.compile(model, ["cpu"] * 2, passes=FAST, n_microbatches=2) as pipe:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.testing.assert_close(pipe(x), model(x))
            assert "0.module" in {str(n.target) for n in pipe.traced.gm.graph.nodes}


def test_rows_that_are_packed_are_told_where_to_pack() -> None:
    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(4, 4, 2, batch_first=True), nn.Linear(4, 3)

        def encode(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            result: Tensor = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0]
            return result

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            result: Tensor = self.head(self.encode(x, lengths))
            return result

    class Inside(Packs):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.encode(x, lengths)

    x, lengths = torch.randn(8, 6, 4), torch.tensor([6, 3, 2, 5, 6, 1, 2, 3])
    with pytest.raises(TraceError, match="run the layers and unpack them inside of one submodule"):
        fxsplit.compile(Packs(), ["cpu"] * 2, passes=FAST, n_microbatches=2, example_inputs=(x, lengths))
    model = Tail(Inside())
    with pytest.warns(fxsplit.FxsplitWarning, match="submodule 'body' of Tail stays whole"):
        pipe = fxsplit.compile(model, ["cpu"] * 2, passes=FAST, n_microbatches=2, example_inputs=(x, lengths))
    with pipe:
        torch.testing.assert_close(pipe(x, lengths), model(x, lengths))


class Tail(nn.Module):
    """A module that takes lengths, followed by a layer."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(4, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x, lengths))
        return result


def test_layers_in_a_graph_are_flattened_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda self: calls.append([*self._flat_weights_names]))
    for module in (nn.GRU(2, 2, 2), nn.LSTM(2, 4, 2, proj_size=2), nn.RNN(2, 2, 2, nonlinearity="relu", bias=False)):
        model = Takes(module)
        pipe = fxsplit.compile(model, ["cpu"] * 2, passes=FAST, example_inputs=torch.ones(3, 4, 2), chunks={"x": 1})
        calls.clear()
        gm = pipe.traced.gm.to("meta")
        flatten_weights([gm])
        per_layer = len(module._flat_weights_names) // 2
        assert calls[1::2] == [module._flat_weights_names[:per_layer]] * 2, "also called where a layer is made"
