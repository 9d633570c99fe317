"""`fxsplit verify`: the proof, its contract, and the errors it finds."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.cli.main import main, make_parser
from fxsplit.cli.model_factory import call_factory
from fxsplit.errors import InputError
from fxsplit.system.progress import listen
from fxsplit.torch_internals.autograd.sums import Share, Sums
from fxsplit.torch_internals.random.no_dropout import disable_dropout
from tests.support.models import FAST, Mlp

MODELS = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x, labels=None):
        logits = self.b(F.dropout(self.drop(torch.relu(self.norm(self.a(x)))), 0.3, self.training))
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.a(x) + torch.rand_like(x))


def plain():
    return Net(), (torch.randn(8, 8),)


def labelled():
    return Net(), (torch.randn(8, 8),), {"labels": torch.randint(0, 3, (8,))}


def with_target():
    return Net(), (torch.randn(8, 8),), {}, torch.randint(0, 3, (8,))


def bare():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(8, 8)


def noisy():
    return Noise(), (torch.randn(8, 8),)


def three():
    return 3


number = 4
"""


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own module, in the current folder."""
    (tmp_path / "verified_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "verified_models", raising=False)


def answer(capsys: pytest.CaptureFixture[str], factory: str, *options: str) -> tuple[int, Any]:
    code = main(["verify", f"verified_models:{factory}", "--json", *options])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("factory", ["plain", "labelled", "bare"])
def test_the_contract(capsys: pytest.CaptureFixture[str], factory: str) -> None:
    code, found = answer(capsys, factory, "--devices", "2", "--n-microbatches", "4")
    assert code == 0 and found["equal"] is True and found["offending"] == []
    assert found["max_relative_difference"] <= 1e-9 and found["stages"] == 2 and found["dtype"] == "float64"
    assert found["front_end"] == "symbolic_trace" and found["nodes"] >= 2 and found["n_microbatches"] == 4
    # Batch norm on microbatches is not batch norm on the whole batch, and that is no fault of the pipeline.
    assert ("norm.running_var" in found["differs_from_whole_batch"]) == (factory != "bare")


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "verified_models:plain", "--schedule", "ZB-H1"]) == 0
    out = capsys.readouterr().out
    assert "gradient" in out and "norm.weight" in out and "equal; " in out and "by nature" in out


def test_every_option_of_compile_is_one_of_the_command() -> None:
    commands = next(action.choices for action in make_parser()._actions if action.dest == "command")
    assert isinstance(commands, dict)
    known = {action.dest for action in commands["verify"]._actions}
    # The factory makes the first two. Observers are objects, and without checks there would be nothing to verify.
    others = {"model", "example_inputs", "observers", "check_rewrites"}
    assert set(inspect.signature(fxsplit.compile).parameters) - others <= known


def test_options_count_as_in_compile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pipe = fxsplit.compile(model, 2, example_inputs=torch.randn(8, 8), passes=FAST, n_microbatches=4)
    pipe.costs.save(tmp_path / "net.json")
    fxsplit.compile(copy.deepcopy(model).double(), 2).save_weights(tmp_path / "weights")
    options = ["--costs", "net.json", "--weights", "weights", "--dtype", "float32", "--dump", "ir"]
    options += ["--chunks", "input=0", "--devices", "cpu,cpu", "--n-microbatches", "4", "--inference"]
    code, found = answer(capsys, "bare", *options)
    assert code == 0 and found["equal"] is True and found["n_microbatches"] == 4
    assert any((tmp_path / "ir").iterdir())
    code, found = answer(capsys, "bare", "--schedule", "auto", "--n-microbatches", "auto", "--deferred-batch-norm")
    assert code == 0 and found["equal"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n-microbatches", "many"], "n_microbatches='many'"),
        (["--n-microbatches", "0"], "n_microbatches=0"),
        (["--schedule", "1f1b"], "did you mean '1F1B'"),
        (["--recompute", "allways"], "did you mean 'always'"),
        (["--compress", "int4"], "did you mean 'int8'"),
        (["--stage-backend", "inducto"], "inducto"),
        (["--weights", "nowhere"], "nowhere"),
        (["--dtype", "float32"], "dtype=torch.float32 is for the checkpoint"),
        (["--weights", "w", "--dtype", "flaot32"], "--dtype flaot32: give a dtype of torch, such as float32; did you"),
        (["--costs", "nowhere.json"], "nowhere.json"),
        (["--chunks", "input"], "--chunks input: give an argument and its dimension"),
        (["--chunks", "inputs=0"], "did you mean 'input'"),
        (["--devices", "gpu"], "gpu"),
        (["--bucket-bytes", "25MB"], "--bucket-bytes is for several ranks"),
    ],
)
def test_a_wrong_option_has_compiles_error(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "verified_models:bare", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_wrong_gradient_is_found_and_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Sums.add

    def doubled(self: Sums, shares: Iterable[Share]) -> None:
        add(self, [(leaf, 2 * g if leaf.shape == (3, 8) else g, own) for leaf, g, own in shares])

    monkeypatch.setattr(Sums, "add", doubled)
    code, found = answer(capsys, "plain")
    assert code == 1 and found["equal"] is False and "gradient b.weight" in found["offending"]
    assert main(["verify", "verified_models:plain"]) == 1
    assert "NOT equal" in capsys.readouterr().out


def test_the_loss_of_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = answer(capsys, "with_target", "--loss-fn", "torch.nn.functional:cross_entropy")
    assert code == 0 and found["loss"] == "loss_fn 'cross_entropy'"
    assert answer(capsys, "plain")[1]["loss"] == "the sum of squares of the outputs"
    assert main(["verify", "verified_models:labelled"]) == 0
    assert "trained with the model's own loss" in capsys.readouterr().out
    for factory, option, message in (
        ("with_target", [], "--loss-fn is missing: name a function of outputs and target"),
        ("plain", ["--loss-fn", "torch.nn.functional:cross_entropy"], "returns no target for it"),
        ("with_target", ["--loss-fn", "torch.nn.functional"], "write MODULE:NAME, such as torch.nn.functional:cross_"),
        ("with_target", ["--loss-fn", "torch.nn:CrossEntropyLoss"], "is no function or module: give loss_fn"),
    ):
        assert main(["verify", f"verified_models:{factory}", *option]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("verified_models:noisy", "Noise draws random numbers besides dropout"),
        ("verified_models:three", r"returned a int: return (model, args)"),
        ("verified_models:number", "is a int: give a function"),
        ("verified_models:other", "has no 'other'"),
        ("no_such_module:make", "cannot import 'no_such_module'"),
        ("verified_model:plain", "No module named 'verified_model'; did you mean 'verified_models'?"),
        ("verified_models", "write MODULE:FACTORY"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], factory: str, message: str) -> None:
    assert main(["verify", factory]) == 2
    assert message in capsys.readouterr().err


def test_neither_pipeline_nor_model_are_changed() -> None:
    model, x = Mlp(), torch.randn(8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with fxsplit.compile(model, 2, n_microbatches=2, passes=FAST) as pipe:
        torch.manual_seed(3)
        expected = torch.rand(2)
        torch.manual_seed(3)
        assert fxsplit.verify(pipe, x).equal
        assert torch.equal(torch.rand(2), expected), "the caller's generator is as it was"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_nothing_drops_while_verifying() -> None:
    x = torch.randn(4, 8, 16)
    attention = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
    with disable_dropout():
        assert torch.equal(attention(x, x, x)[0], attention(x, x, x)[0])
        assert torch.equal(nn.Dropout(0.5)(x), x) and torch.equal(nn.functional.alpha_dropout(x, 0.5, True), x)
    assert not torch.equal(nn.Dropout(0.5)(x), x)


def test_what_a_factory_raises_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    from fxsplit.cli.main import main

    said = {name: f"tests.cli.test_verify:{name}" for name in ("raising", "lazy")}
    for name, text in {**said, "single_rows": "Sequential runs on the whole example of 3 rows, and not on"}.items():
        assert main(["verify", f"tests.cli.test_verify:{name}", "--n-microbatches", "3", "--json"]) == 2
        assert text in capsys.readouterr().err


def test_an_error_of_the_users_code_has_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and line of the model, the factory or the module that raised stand in the command's one line."""
    lines = [
        "import torch",
        "class Wrong(torch.nn.Linear):",
        "    def forward(self, x): return super().forward(x)",
        "def model(): return Wrong(4, 5), torch.randn(8, 3)",
        "def factory(): return {}['weights']",
    ]
    (tmp_path / "wrong_lines.py").write_text("\n".join(lines))
    (tmp_path / "wrong_module.py").write_text("a = 1\na / 0\n")
    (tmp_path / "wrong_import.py").write_text("\nimport wrong_module.part\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, file, line, message in (
        ("wrong_lines:model", "wrong_lines", 3, "mat1 and mat2 shapes cannot be multiplied"),
        ("wrong_lines:factory", "wrong_lines", 5, "'weights'; it is called without arguments"),
        ("wrong_module:f", "wrong_module", 2, "division by zero"),
        ("wrong_import:f", "wrong_module", 2, "division by zero"),
    ):
        assert main(["verify", name]) == 2
        said = capsys.readouterr().err
        assert f'{file}.py", line {line}: {message}' in said and said.count("\n") == 1, said


def raising() -> Any:
    raise KeyError("weights")


def single_rows() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (torch.randn(3, 4),)


def lazy() -> Any:
    return nn.Sequential(nn.Linear(4, 4), Failing()), (torch.randn(3, 4),)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.ones(3, 5))


def test_a_module_that_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its SyntaxError was a traceback."""
    (tmp_path / "broken_factories.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="cannot import 'broken_factories': SyntaxError: "):
        call_factory("broken_factories:f")


def test_loading_torch_is_shown_as_progress() -> None:
    """A newcomer's first command was silent for seconds."""
    heard: list[str] = []
    with listen(lambda what, done, total: heard.append(what)):
        assert main(["verify", "no.such.module:make"]) == 2
    assert heard[:2] == ["loading torch"] * 2
