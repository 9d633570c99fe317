"""The compiler keeps one program for each mode, and one for each shape if an exported graph needs it."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.api.compiler import compiler as compiling
from fxsplit.api.compiler import lowering
from fxsplit.api.compiler.compiler import Compiler
from fxsplit.api.compiler.options import CompileOptions
from fxsplit.errors import MissingFact
from fxsplit.ir.chain import parse_chain
from fxsplit.ir.facts.capture.call import Call
from fxsplit.passes import PASSES
from tests.support.models import FAST, Mlp, ModeDependent


def make(model: nn.Module, chain: str = FAST, **options: Any) -> Compiler:
    return Compiler(
        model, CompileOptions(machine=fxsplit.Machine.of(["cpu"] * 2), chain=parse_chain(chain, PASSES), **options)
    )


def call(*tensors: Tensor) -> Call:
    return Call(tensors, {})


def count_captures(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Note the sizes of the microbatches of each capture."""
    captured: list[list[int]] = []
    capture = lowering.capture_model

    def noting(model: Any, options: Any, called: Any, rows: list[int], **how: Any) -> Any:
        captured.append(list(rows))
        return capture(model, options, called, rows, **how)

    monkeypatch.setattr(compiling, "capture_model", noting)
    return captured


def test_a_mode_is_compiled_once_for_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = count_captures(monkeypatch)
    compiler = make(Mlp(), n_microbatches=4)
    program = compiler.program("train", call(torch.randn(10, 8)))
    assert compiler.program("train", call(torch.randn(5, 8))) is program and captured == [[3, 3, 2, 2]]


def test_a_second_mode_leaves_the_first_ones_program(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, model, x = count_captures(monkeypatch), ModeDependent(), call(torch.randn(8, 8))
    compiler = make(model, n_microbatches=2)
    trained = compiler.program("train", x)
    model.eval()
    compiler.program("eval", x)
    model.train()
    assert compiler.program("train", x) is trained and captured == [[4, 4], [4, 4]]


def test_modes_with_one_graph_share_a_program_and_others_do_not() -> None:
    for model, shared in ((Mlp(), True), (ModeDependent(), False)):
        x = call(torch.randn(8, 8))
        compiler = make(model)
        trained = compiler.program("train", x)
        model.eval()
        assert (compiler.program("eval", x) is trained) == shared
        compiled = compiler.get_compiled("eval")
        assert compiled is not None and not compiled.moves_weights


class Reverses(nn.Module):
    """Calls its layers in reverse order in evaluation, so that no cut of one mode suits the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.tanh(self.a(x))) if self.training else self.a(torch.sigmoid(self.b(x)))
        return result


def test_a_mode_that_is_planned_anew_measures_what_the_saved_costs_lack() -> None:
    # The second plan must not take the costs of training as complete.
    model, x = Reverses(), torch.randn(8, 8)
    costs = fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, passes=FAST).costs
    with fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, passes=FAST, costs=costs) as pipe:
        pipe(x)
        torch.testing.assert_close(pipe.eval()(x), model(x))
        compiled = pipe.compiler.get_compiled("eval")
        assert compiled is not None and compiled.moves_weights


class ByLength(nn.Module):
    """Decides by the length of its sequences, so that torch.export must export it for each length."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 4:
            x = self.drop(self.a(x))
        result: Tensor = self.b(torch.tanh(x))
        return result


def test_programs_are_kept_by_mode_and_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = count_captures(monkeypatch)
    model = ByLength()
    compiler = make(model, n_microbatches=2)
    six, three = call(torch.randn(8, 6, 8)), call(torch.randn(8, 3, 8))
    first, other = compiler.program("train", six), compiler.program("train", three)
    assert other is not first and len(captured) == 2
    assert compiler.program("train", three) is other and compiler.program("train", six) is first
    assert len(captured) == 2
    model.a = nn.Linear(8, 8)  # another model: everything compiled is forgotten
    assert compiler.program("train", six) is not first
    assert compiler.program("train", three) is not other and len(captured) == 4
    monkeypatch.setattr(compiling, "MOST_SHAPES", 1)
    two = call(torch.randn(8, 2, 8))
    of_two = compiler.program("train", two)
    assert of_two is compiler.program("train", two) and len(captured) == 5
    compiler.program("train", three)
    assert len(captured) == 6, "of programs for other shapes the last is kept; there was an end at sixteen"


def test_an_outdated_mode_takes_its_other_shapes_with_it() -> None:
    """Only the first program of a mode is checked, though forward() may read an attribute only for other shapes."""
    model = ByLength()
    compiler = make(model, n_microbatches=2)
    six, three = call(torch.randn(8, 6, 8)), call(torch.randn(8, 3, 8))
    first, other = compiler.program("train", six), compiler.program("train", three)
    model.drop.p = 0.25
    with pytest.warns(fxsplit.FxsplitWarning, match="attribute 'drop.p' of the model changed from 0.0 to 0.25") as said:
        assert compiler.program("train", six) is not first
    assert said[0].filename == __file__
    assert compiler.program("train", three) is not other
    model.drop.p = 0.0
    assert compiler.program("train", six) is first, "what was compiled for these values was thrown away"


def test_a_call_is_prepared_with_its_rows() -> None:
    compiler = make(Mlp(), n_microbatches=4)
    x = torch.randn(10, 8)
    batch = compiler.prepare("train", call(x))
    assert batch.rows == [3, 3, 2, 2] and batch.tensors == [x]
    with pytest.warns(fxsplit.FxsplitWarning, match="a batch of 3 rows is cut into 3 microbatches, .*drop_last=True"):
        assert compiler.prepare("train", call(torch.randn(3, 8))).rows == [1, 1, 1]
    assert compiler.prepare("train", call(torch.randn(2, 8))).rows == [1, 1], "said once"


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(MissingFact, match=r"no Plan yet .* run 'partition' earlier in the chain"):
        make(Mlp(), "profile{repeats=1}").program("train", call(torch.randn(8, 8)))
    with pytest.raises(MissingFact, match=r"no Stages yet .* run 'emit' earlier in the chain"):
        make(Mlp(), "profile{repeats=1},augment,order,partition").program("train", call(torch.randn(8, 8)))


class Positions(nn.Module):
    """Adds a position to each element, which only torch.export follows, for any length; `fixed`: for one length."""

    def __init__(self, fixed: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.fixed = nn.Linear(8, 8), nn.Linear(8, 8), fixed

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 100:
            x = x * 2
        places = torch.arange(len([*range(x.shape[1])]) if self.fixed else x.shape[1], dtype=x.dtype)
        result: Tensor = self.b(torch.tanh(self.a(x) + places[None, :, None])) / x.shape[1]
        return result


@pytest.mark.parametrize("fixed", [False, True])
def test_an_exported_graph_serves_every_length_that_it_is_right_for(
    fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new length needs no new export and no new profile, if the graph is right for it."""
    captured = count_captures(monkeypatch)
    model = Positions(fixed).double()
    unsplit, first = copy.deepcopy(model), torch.randn(8, 5, 8, dtype=torch.float64)
    with fxsplit.compile(model, 2, n_microbatches=4, loss_fn=F.mse_loss, passes=FAST, example_inputs=first) as pipe:
        for length in (7, 2, 11, 5, 7, 101):
            x = torch.randn(8, length, 8, dtype=torch.float64)
            model.zero_grad()
            unsplit.zero_grad()
            pipe.step(x, target=x)
            F.mse_loss(unsplit(x), x).backward()
            for p, q in zip(model.parameters(), unsplit.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)
    # Beyond 100 forward() takes another branch, which is another graph.
    assert len(captured) == (5 if fixed else 2)


class Counting(nn.Module):
    """Decides by a value, so that it stays whole, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.fc(x) if float(x.sum()) < 1e9 else x
        return out


@pytest.mark.filterwarnings("ignore::fxsplit.FxsplitWarning")
def test_compiling_counts_no_calls() -> None:
    """Profiling must restore the counter of a submodule that stays whole."""
    model, x = nn.Sequential(nn.Linear(8, 8), Counting(), nn.Linear(8, 3)), torch.randn(8, 8)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=FAST) as pipe:
        assert model[1].calls == 0
        pipe(x)
        assert model[1].calls == 2


class Doubled(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("inner", [False, True])
def test_another_class_of_a_module_is_another_model(inner: bool) -> None:
    """Quantizing, for example, changes the class: the pipeline must run the forward() of the new class."""
    part, x = Mlp(), torch.randn(8, 8)
    model = nn.Sequential(nn.Tanh(), part) if inner else part
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        before = pipe(x)
        part.__class__ = Doubled
        torch.testing.assert_close(pipe(x), model(x))
        torch.testing.assert_close(pipe(x), 2 * before)


LOG = io.BytesIO()
"""The rows of each run on values, a byte for each run. A list would get its items back after the runs of a compile."""


def note_rows(x: Tensor) -> Tensor:
    """Note the rows of a run on values; a graph has one node for it."""
    if type(x) is Tensor and x.device.type == "cpu":
        LOG.write(bytes([len(x)]))
    return torch.relu(x)


torch.fx.wrap("note_rows")


def take_rows() -> list[int]:
    """Return the noted rows, and forget them."""
    found = sorted(LOG.getvalue())
    LOG.seek(0)
    LOG.truncate()
    return found


class Noted(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(note_rows(x))


def test_what_is_run_twice_is_run_once() -> None:
    """A compile with known costs ran the model 9 times, over 36 rows, and verify 42 times, over 200 rows."""
    x = torch.randn(8, 8)
    options: dict[str, Any] = {"passes": FAST, "n_microbatches": 2}
    with fxsplit.compile(Noted(), 2, example_inputs=x, **options) as pipe:
        take_rows()
        fxsplit.compile(Noted(), 2, example_inputs=x, costs=pipe.costs, **options).close()
        # The model watched, and compared with its graph; three sizes to join, of which the first run is one; the graph
        # observed.
        assert take_rows() == [2, 4, 4, 4, 6]
        assert fxsplit.verify(pipe, x).equal
        ran = take_rows()
        assert len(ran) <= 25 and sum(ran) <= 120
