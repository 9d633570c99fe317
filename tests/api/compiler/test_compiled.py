"""Training and evaluation share weights, whether or not their graphs are the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit import DEFAULT, IR
from fxsplit.api.compiler.compiled import OTHER_MODE
from fxsplit.ir.graph import ignores_mode
from fxsplit.passes import PASSES, Emit
from tests.support.models import FAST, Residual
from tests.support.own_passes import fold_in_evaluation


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


class Smaller(nn.Module):
    """Has fewer nodes in evaluation than there are devices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            first: Tensor = self.a(x)
            return first
        result: Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return result


def test_a_mode_with_fewer_nodes_than_devices() -> None:
    model = Smaller()
    x = vectors()
    with fxsplit.compile(model, 4, example_inputs=x, passes=FAST) as pipe:
        pipe.eval()
        torch.testing.assert_close(pipe(x), model(x))
        assert "(passes values on)" in str(pipe.plan)


class TwoWays(nn.Module):
    """Uses one weight as a module in training and as a plain tensor in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        x = self.b(x) if self.training else F.linear(x, self.b.weight, self.b.bias)
        result: Tensor = self.c(torch.tanh(x))
        return result


@pytest.mark.parametrize("first", [True, False])
def test_weights_stay_where_they_are_however_a_mode_reaches_them(first: bool) -> None:
    model = TwoWays().train(first)
    x = vectors()
    with fxsplit.compile(model, 3, example_inputs=x, passes=FAST) as pipe:
        homes = [{id(w) for w in s.module.parameters()} for s in pipe.stages.stages]
        torch.testing.assert_close(pipe.train(not first)(x), model(x))
        assert [{id(w) for w in s.module.parameters()} for s in pipe.stages.stages] == homes


def test_a_pass_that_depends_on_the_mode_is_run_in_both() -> None:
    """The program of evaluation, with batch norms folded, must not serve training."""
    model, x = Residual().eval(), torch.randn(8, 3, 8, 8)
    reference = copy.deepcopy(model)
    with fxsplit.compile(
        model, 2, example_inputs=x, n_microbatches=2, passes=DEFAULT.before("profile", fold_in_evaluation)
    ) as pipe:
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), reference(x), rtol=1e-4, atol=1e-5)
        pipe.train()
        reference.train()
        torch.testing.assert_close(pipe(x), torch.cat([reference(x[:4]), reference(x[4:])]))
        for (name, found), expected in zip(model.named_buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(found, expected, msg=name)


def note_modes(found: list[str]) -> fxsplit.Pass:
    """A pass that notes the mode of the IR that it is given."""

    def note(ir: IR) -> IR:
        found.append(ir.mode)
        return ir

    return note


@pytest.mark.parametrize("first", ["train", "eval"])
@pytest.mark.parametrize("exported", [False, True])
def test_the_ir_says_which_mode_it_is_of(first: str, exported: bool) -> None:
    """A pass must know the mode: the graph's own flag says training for every exported model."""
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    if exported:
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x = torch.randn(4, 4, 8)
    found: list[str] = []
    second = OTHER_MODE[first]  # type: ignore[index]
    chain = DEFAULT.before("profile", note_modes(found))
    with fxsplit.compile(model.train(first == "train"), 2, example_inputs=x, passes=chain) as pipe:
        assert found == [first] and pipe.traced.mode == pipe.ir.mode == first
        assert pipe.traced.gm.training == (first == "train")
        pipe.train(second == "train")
        pipe(x)
        assert found == [first, second] and pipe.traced.mode == pipe.ir.mode == second


def test_passes_that_ignore_the_mode_are_run_once() -> None:
    """True for fxsplit's own passes, and for passes that say so; a derived class must say so again."""
    found: list[str] = []
    note = note_modes(found)
    note.ignores_mode = True  # type: ignore[attr-defined]
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), vectors()
    with fxsplit.compile(model, 2, example_inputs=x, passes=DEFAULT.before("profile", note)) as pipe:
        stages = pipe.stages
        pipe.eval()(x)
        assert found == ["train"] and pipe.stages is stages and pipe.ir.mode == "eval"
    assert all(ignores_mode(kind.__new__(kind)) for kind in PASSES.values())

    class Mine(Emit):
        """Another emit."""

    assert not ignores_mode(Mine()) and not ignores_mode(lambda ir: ir)


class Dropping(nn.Module):
    """A model with parts that may be in different modes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.drop(self.a(x)))
        return result


def test_a_pass_that_asks_a_submodule_for_its_mode_is_run_again_when_that_changes() -> None:
    """The graph is the same in both modes of the submodule, but the stages must be made again."""
    found: list[bool] = []

    def note(ir: IR) -> IR:
        found.append(ir.gm.get_submodule("drop").training)
        return ir

    model, x = Dropping(), vectors()
    with fxsplit.compile(model, 2, example_inputs=x, passes=DEFAULT.before("profile", note)) as pipe:
        model.drop.eval()
        torch.testing.assert_close(pipe(x), model(x))
        assert found == [True, False]


class ByLength(nn.Module):
    """Is exported, as it decides by a length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        h = h if h.shape[1] < 100 else h * 2
        result: Tensor = self.b(torch.tanh(self.a(h)).mean(1))
        return result


def test_a_small_batch_may_be_the_first_in_evaluation_or_of_its_length() -> None:
    """A batch with fewer rows than n_microbatches is cut into fewer, even if it is the first of its kind."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.0), nn.Tanh(), nn.Linear(6, 3))
    with fxsplit.compile(model, 2, example_inputs=vectors(), n_microbatches=4, passes=FAST) as pipe:
        pipe.eval()
        x = vectors(3)
        with pytest.warns(fxsplit.FxsplitWarning, match="a batch of 3 rows is cut into 3 microbatches"):
            torch.testing.assert_close(pipe(x), model(x))
    model, tokens = ByLength(), torch.randint(9, (8, 5))
    with fxsplit.compile(model, 2, example_inputs=tokens, n_microbatches=4, passes=FAST) as pipe:
        tokens = torch.randint(9, (2, 7))
        with pytest.warns(fxsplit.FxsplitWarning, match="a batch of 2 rows is cut into 2 microbatches"):
            torch.testing.assert_close(pipe(tokens), model(tokens))
