"""Compiled stages: once for all numbers of rows, equal to the unsplit model, with a warning for each recompile.

Warnings are errors in this file, so a test that does not expect a warning has seen none.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import register_backend
from torch.nn import functional as F

import fxsplit
from fxsplit.api.verify.compare import compare, run_pipeline_step, run_unsplit_step
from fxsplit.api.verify.verify import TOLERANCE
from fxsplit.errors import RecompileWarning, StageError
from fxsplit.ir.facts.capture.example import Example
from fxsplit.torch_internals.random.seeded_calls import SeededCall, new_seed, take_turn
from tests.support.models import FAST

# The warning comes from torch if a compiled function has two graphs and a gradient goes from one to the other. torch
# drops a function that was compiled twice after its globals are gone, and Python reports that it ignores this.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
between_graphs = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
ROWS = (12, 11, 10, 7, 12)
_graphs: list[fx.GraphModule] = []
_works = True


@register_backend(name="counting")
def count(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Count graphs without compiling."""
    if not _works:
        raise ValueError("the compiler is broken")
    _graphs.append(graph)
    return graph.forward


@pytest.fixture
def graphs() -> Iterator[list[fx.GraphModule]]:
    """The graphs that were compiled in the test."""
    _graphs.clear()
    yield _graphs
    torch._dynamo.reset()


def make_layers(width: int = 8) -> nn.Sequential:
    layers = [nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 8)]
    return nn.Sequential(*layers).double()


class Folded(nn.Module):
    """Folds its rows into another dimension, and reads their number in another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        n, length, width = x.shape
        h = torch.tanh(self.b(self.a(x).reshape(n * length, width)))
        return self.d(torch.tanh(self.c(h)).reshape(n, length, width))


class Turned(nn.Module):
    """Takes rows in the middle, and returns them first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_layers()

    def forward(self, x: Tensor) -> Any:
        return self.layers(x).transpose(0, 1)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


@dataclass
class Setting:
    """A model, the row dimension of its input, options, and the expected number of graphs."""

    model: nn.Module
    shape: tuple[int, ...] = (12, 8)
    dim: int = 0
    graphs: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    devices: int = 2


def list_settings() -> dict[str, Setting]:
    replicated = "profile,augment,order,partition{model=replicated},emit"
    return {
        "1F1B": Setting(make_layers()),
        "as many rows as columns": Setting(make_layers(4)),
        "ZB-H1": Setting(make_layers(), options={"schedule": "ZB-H1"}),
        "recompute": Setting(make_layers(), options={"recompute": "always"}),
        "in two stages at a time": Setting(make_layers(), options={"schedule": "Chimera", "n_microbatches": 2}),
        "replicas": Setting(make_layers(), devices=3, graphs=1, options={"passes": replicated}),
        "rows that are folded": Setting(Folded(), (12, 5, 8)),
        "rows in the middle": Setting(Turned(), (5, 12, 8), 1, options={"chunks": {"x": 1}}),
        "batch norm": Setting(Normed()),
    }


@pytest.mark.parametrize("name", list_settings())
def test_one_compile_serves_all_numbers_of_rows(name: str, graphs: list[fx.GraphModule]) -> None:
    setting = list_settings()[name]
    torch.manual_seed(0)
    model, x = setting.model.double(), torch.randn(setting.shape, dtype=torch.float64)
    unsplit = copy.deepcopy(model)
    options: Any = {"passes": FAST, "n_microbatches": 3, "loss_fn": F.mse_loss, **setting.options}
    with fxsplit.compile(model, setting.devices, example_inputs=x, stage_backend="counting", **options) as pipe:
        for rows in ROWS:
            some = x.narrow(setting.dim, 0, rows)
            target = some.transpose(0, setting.dim)
            found = run_pipeline_step(pipe, [some], target)
            inputs, count = pipe.traced[Example].inputs, options["n_microbatches"]
            expected = run_unsplit_step(unsplit, [some], target, F.mse_loss, count, inputs=inputs)
            assert compare(found, expected).largest < TOLERANCE[torch.float64]
            for each in (model, unsplit):
                each.zero_grad()
        assert len(graphs) == setting.graphs


def test_a_new_mode_and_a_single_row_are_told_of_once(graphs: list[fx.GraphModule]) -> None:
    model, x = make_layers(), torch.randn(12, 8, dtype=torch.float64)
    unsplit = copy.deepcopy(model)
    with fxsplit.compile(model, 2, passes=FAST, n_microbatches=3, stage_backend="counting") as pipe:
        pipe(x)
        with pytest.warns(RecompileWarning) as told, torch.no_grad():
            torch.testing.assert_close(pipe.eval()(x), unsplit(x))
        with pytest.warns(RecompileWarning) as told_of_one, torch.no_grad():
            torch.testing.assert_close(pipe(x[:3]), unsplit(x[:3]))
        # Now everything is compiled.
        for rows in (*ROWS, 3):
            with torch.no_grad():
                torch.testing.assert_close(pipe(x[:rows]), unsplit(x[:rows]))
            torch.testing.assert_close(pipe.train()(x), unsplit(x))
            pipe.eval()
    # torch may warn of Python 3.13.0 besides.
    (first,), (second,) = ([w for w in each if w.category is RecompileWarning] for each in (told, told_of_one))
    text = str(first.message)
    assert text.startswith("counting has compiled again: stage 0 for float64[n, 8] without gradients in evaluation in ")
    assert "; stage 1 for float64[n, 8] without gradients in evaluation in " in text and text.endswith(" s")
    assert first.filename == __file__
    assert "stage 1 for float64[1, 8] without gradients" in str(second.message)


class Tuned(nn.Module):
    """Multiplies by a Python number that only torch.compile looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.name = nn.Linear(8, 8), "0"

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * len(self.name)


def test_what_torch_compiles_for_reasons_of_its_own_is_told_of_up_to_its_limit(
    graphs: list[fx.GraphModule],
) -> None:
    tuned, x = Tuned(), torch.randn(4, 8)
    model = nn.Sequential(nn.Linear(8, 8), tuned)
    texts = []
    options: Any = {"passes": f"leaf{{path=1}},{FAST}", "n_microbatches": 2, "stage_backend": "counting"}
    with torch._dynamo.config.patch(recompile_limit=3), fxsplit.compile(model, 2, **options) as pipe:
        for length in (1, 2, 3, 4):
            tuned.name = "0" * length
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always", RecompileWarning)
                torch.testing.assert_close(pipe(x), model(x))
            texts += [str(one.message) for one in told if one.category is RecompileWarning]
    assert "stage 1 for what its modules read besides tensors" in texts[0] and "torch's limit" not in texts[0]
    assert "Stage 1 has been compiled 3 times, which is torch's limit" in texts[1] and len(texts) == 2


# Draws


def drop_in_turn(model: nn.Sequential, names: dict[str, str]) -> nn.Sequential:
    """Return the unsplit model with the draws of a pipeline: each dropout draws as the node does that it is."""
    return nn.Sequential(*(SeededCall(names[n], m) if n in names else m for n, m in model.named_children()))


# A warning of torch as it loads inductor.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["counting", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("options", [{}, {"recompute": "always"}, {"schedule": "Chimera"}], ids=str)
def test_dropout_is_that_of_the_unsplit_model(
    options: dict[str, Any], backend: str, graphs: list[fx.GraphModule]
) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 8), nn.Dropout1d(0.4), nn.Linear(8, 8)]
    model, x = nn.Sequential(*layers).double(), torch.randn(12, 5, 8, dtype=torch.float64)
    unsplit = copy.deepcopy(model)
    given: Any = {"passes": FAST, "n_microbatches": 4, "loss_fn": F.mse_loss, "stage_backend": backend, **options}
    with fxsplit.compile(model, 2, example_inputs=x, **given) as pipe:
        names = {
            n.target[5:].lstrip("_"): n.target[5:]
            for s in pipe.stages.stages
            for n in s.module.graph.nodes
            if "draw_" in str(n.target)
        }
        reference = drop_in_turn(unsplit, names)
        for rows in (12, 11, 9):
            some = x[:rows]
            torch.manual_seed(rows)
            found = pipe.step(some, target=some)
            torch.manual_seed(rows)
            seed, expected = new_seed(), 0.0
            for m, piece in enumerate(some.tensor_split(4)):
                with take_turn(seed, m, [x.device]):
                    loss = F.mse_loss(reference(piece), piece) * (len(piece) / rows)
                loss.backward()
                expected += float(loss.detach())
            assert abs(float(found) - expected) < TOLERANCE[torch.float64]
            for a, b in zip(model.parameters(), unsplit.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=TOLERANCE[torch.float64], atol=1e-12)
        assert backend != "counting" or len(graphs) == 2, "dropout cuts no graph"
        assert options or fxsplit.verify(pipe, x).equal


@between_graphs
def test_what_draws_otherwise_is_called_between_graphs(graphs: list[fx.GraphModule]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.AlphaDropout(0.3), nn.Tanh(), nn.Linear(8, 8), nn.AlphaDropout(0.3), nn.Linear(8, 8)]
    model, x = nn.Sequential(*layers).double(), torch.randn(12, 8, dtype=torch.float64)
    ours = copy.deepcopy(model)
    options: Any = {"passes": FAST, "n_microbatches": 3, "loss_fn": F.mse_loss, "example_inputs": x}
    with (
        fxsplit.compile(ours, 2, stage_backend="counting", **options) as pipe,
        fxsplit.compile(model, 2, **options) as same,
    ):
        for rows in ROWS:
            for each in (pipe, same):
                torch.manual_seed(rows)
                each.step(x[:rows], target=x[:rows])
            for a, b in zip(ours.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad)
        # Two dropouts cut two stages into four graphs, or three if a dropout is at a stage's end.
        assert len(graphs) in (3, 4)


@between_graphs
def test_deferred_batch_norm_is_compiled_around(graphs: list[fx.GraphModule]) -> None:
    model, x = Normed().double(), torch.randn(12, 8, dtype=torch.float64)
    ours = copy.deepcopy(model)
    options: Any = {"passes": FAST, "n_microbatches": 3, "deferred_batch_norm": True, "loss_fn": F.mse_loss}
    with (
        fxsplit.compile(ours, 2, stage_backend="counting", **options) as pipe,
        fxsplit.compile(model, 2, **options) as same,
    ):
        for rows in ROWS:
            found, expected = (run_pipeline_step(p, [x[:rows]], x[:rows]) for p in (pipe, same))
            assert compare(found, expected).largest < TOLERANCE[torch.float64]
        assert len(graphs) in (2, 3, 4)


def test_a_pipeline_with_versions_of_weights_is_compiled_too(graphs: list[fx.GraphModule]) -> None:
    """Once PipeDream ran stages uncompiled despite the option."""
    model, x = make_layers(), torch.randn(12, 8, dtype=torch.float64)
    ours = copy.deepcopy(model)
    options: Any = {"passes": FAST, "n_microbatches": 4, "schedule": "PipeDream", "loss_fn": F.mse_loss}
    with (
        fxsplit.compile(model, 2, example_inputs=x, **options) as same,
        # The versions depend on the plan, so both use one plan.
        fxsplit.compile(ours, 2, stage_backend="counting", costs=same.costs, **options) as pipe,
    ):
        for rows in (12, 11, 9):
            for each, trained in ((pipe, ours), (same, model)):
                each.step(x[:rows], target=x[:rows], optimizer=torch.optim.SGD(trained.parameters(), 0.1))
            for a, b in zip(ours.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(a, b)
        assert len(graphs) == 2


def test_a_backend_that_fails_is_asked_again(graphs: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make_layers(), torch.randn(12, 8, dtype=torch.float64)
    with fxsplit.compile(model, 2, passes=FAST, n_microbatches=3, stage_backend="counting") as pipe:
        with monkeypatch.context() as patch:
            patch.setitem(globals(), "_works", False)
            with pytest.raises(StageError, match="backend='counting' raised:\\nValueError: the compiler is broken"):
                pipe(x)
        torch.testing.assert_close(pipe(x), model(x))
    assert len(graphs) == 2


def test_a_length_that_has_differed_is_dynamic_in_every_mode(graphs: list[fx.GraphModule]) -> None:
    """In evaluation torch once began with the length of its first call, and compiled again for the second."""
    model, x = make_layers(), torch.randn(12, 9, 8, dtype=torch.float64)
    with fxsplit.compile(model, 2, passes=FAST, n_microbatches=3, stage_backend="counting") as pipe:
        pipe(x[:, :5].contiguous())
        with pytest.warns(RecompileWarning, match=r"stage 0 for float64\[n, n, 8\] in .*; stage 1 for"):
            pipe(x)
        with torch.no_grad(), pytest.warns(RecompileWarning, match="without gradients"):
            pipe(x)
        for rows, length in ((11, 9), (12, 5), (7, 3)):
            some = x[:rows, :length].contiguous()
            torch.testing.assert_close(pipe(some), model(some))
            with torch.no_grad():
                torch.testing.assert_close(pipe(some), model(some))
    assert len(graphs) == 6
