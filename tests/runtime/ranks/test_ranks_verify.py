"""verify() over ranks: all ranks prove one pipeline together, and measure a gradient hook's effect in one step."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxsplit
from fxsplit.api.verify.verify import Verification
from fxsplit.cli.main import main
from fxsplit.errors import InputError, RanksDiffer
from fxsplit.runtime.ranks.gradients.reducer import Reducer
from tests.proof.test_replicas import chain
from tests.support.models import FAST, Mlp
from tests.support.ranks import ranks

SHARES = [8, 6]


def make_mesh(n: int) -> Any:
    return init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "pp"))


def make_own_batch(mesh: Any) -> Tensor:
    """Return the rows of this rank's pipeline; the second pipeline has fewer."""
    row = mesh.get_local_rank("dp")
    return torch.randn(SHARES[row], 8, generator=torch.Generator().manual_seed(row))


def compile_row(mesh: Any, model: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"passes": FAST, "n_microbatches": 3, "bucket_bytes": 500, **options}
    return fxsplit.compile(Mlp(6) if model is None else model, mesh, **options)


HOOKS = ["allreduce", "topk{share=0.2}", "sketch{share=0.2}", "torch's powersgd"]


def measure(rank: int, n: int) -> dict[str, Verification]:
    """Return the finding for each hook. A hook that was used before keeps its compression errors."""
    mesh = make_mesh(n)
    x = make_own_batch(mesh)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    own = {"torch's powersgd": (state, powerSGD_hook.powerSGD_hook)}
    found = {}
    for name in HOOKS:
        pipe = compile_row(mesh, gradient_hook=own.get(name, name), loss_fn=F.mse_loss)
        if name.startswith("topk"):
            pipe.step(x[:6], target=torch.ones(6, 3))
            before = [
                left.clone()
                for _, left in pipe.compiler.compile_group.reduction.data_parallel.reducer.residuals._left.values()
            ]
        found[name] = fxsplit.verify(pipe, x)
        if name.startswith("topk"):
            after = [
                left for _, left in pipe.compiler.compile_group.reduction.data_parallel.reducer.residuals._left.values()
            ]
            assert before and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        pipe.close()
    assert state.iter == 0 and not state.error_dict and state.process_group is None, "a copy was tried"
    return found


@pytest.mark.long
def test_verify_measures_what_hooks_change() -> None:
    told = ranks(4, measure)
    assert all(one == told[0] for one in told), "all ranks return the same"
    for name, found in told[0].items():
        assert found.equal and found.stages == 2, name
        assert {d.name for d in found.differences if d.kind == "gradient"} == dict(Mlp(6).named_parameters()).keys()
        effect = found.gradient_hook
        assert effect is not None
        if name == "allreduce":
            assert effect.gradient < 1e-12 and effect.worst < 1e-12 and effect.left is None
        else:
            assert 1e-2 < effect.gradient <= effect.worst, name
            # The error that a hook keeps is the error of its gradients.
            assert effect.left == pytest.approx(effect.gradient, rel=1e-9) and effect.lost < 1e-12, name
        assert effect.worst_name in dict(Mlp(6).named_parameters())
    topk = str(told[0]["topk{share=0.2}"].gradient_hook)
    assert topk.startswith("gradients added by topk{share=0.2}: off by ") and "is kept for later steps" in topk


class Labelled(nn.Module):
    """Returns its own loss. It has a buffer, and batch norm, with statistics of each pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.last(torch.tanh(self.norm(self.first(x))))
        return {"loss": logits.square().mean(), "logits": logits}


def verify_rows(rank: int, n: int) -> tuple[Verification, Verification, Verification]:
    """Return the findings for the model's own loss, for a wrong sum, and for replicas with a hook."""
    mesh = make_mesh(n)
    x = make_own_batch(mesh)
    torch.manual_seed(0)
    with compile_row(mesh, Labelled(), gradient_hook="bf16") as pipe:
        own = fxsplit.verify(pipe, x)
    finish = Reducer.finish

    def forget(reducer: Reducer, *args: Any) -> Any:
        found = finish(reducer, *args)
        return {p: g * 2 if p.shape == (3, 16) else g for p, g in found.items()}

    Reducer.finish = forget  # type: ignore[method-assign, assignment]
    with compile_row(mesh) as pipe:
        wrong = fxsplit.verify(pipe, x)
    Reducer.finish = finish  # type: ignore[method-assign]
    options: dict[str, Any] = {"n_microbatches": 3, "gradient_hook": "topk{share=0.1}", "passes": chain((1, 2, 1))}
    with fxsplit.compile(Mlp(6), "world", **options) as pipe:
        replicas = fxsplit.verify(pipe, torch.ones(6, 8).cumsum(0))
    return own, wrong, replicas


def test_verify_over_a_mesh_and_over_replicas() -> None:
    for own, wrong, replicas in ranks(4, verify_rows):
        assert own.equal and set(own.by_nature) >= {"norm.running_mean", "norm.running_var"}
        rounded = own.gradient_hook
        assert rounded is not None and 1e-6 < rounded.gradient < 5e-2
        assert rounded.left is None and rounded.lost == rounded.gradient <= rounded.worst
        assert [(d.kind, d.name) for d in wrong.offending] == [("gradient", "layers.5.weight")]
        effect = replicas.gradient_hook
        assert replicas.equal and replicas.stages == 3 and effect is not None
        # Stages without replicas are exact, and nothing that the hook leaves out is lost.
        assert 1e-3 < effect.gradient == pytest.approx(effect.left, rel=1e-9) and effect.lost < 1e-12


def verify_targets(rank: int, n: int) -> list[Verification]:
    """Return the findings for means over labels, sums and means over rows, by pipelines with unequal shares."""
    mesh = make_mesh(n)
    x, row = make_own_batch(mesh), mesh.get_local_rank("dp")
    labels = torch.arange(SHARES[row]) % 3
    # Three of the first pipeline's labels count, and five of the second's.
    few = torch.cat([torch.full((5 if row == 0 else 1,), -100), labels])[: SHARES[row]]
    summed = nn.CrossEntropyLoss(reduction="sum", weight=torch.tensor([1.0, 2.0, 3.0]))
    found = []
    for loss_fn, target in ((F.cross_entropy, few), (summed, labels), (F.mse_loss, torch.ones(SHARES[row], 3))):
        with compile_row(mesh, gradient_hook="topk{share=0.2}", loss_fn=loss_fn) as pipe:
            found.append(fxsplit.verify(pipe, x, target=target))
    with compile_row(mesh, loss_fn=F.cross_entropy) as pipe:
        with pytest.raises(InputError, match="a target on some ranks and none on others"):
            fxsplit.verify(pipe, x, target=labels if rank else None)
        with pytest.raises(InputError, match=r"target has shape \(3,\) and the batch has"):
            fxsplit.verify(pipe, x, target=labels[:3])
        assert fxsplit.verify(pipe, x, target=labels).equal, "the next call works"
    return found


def test_verify_with_the_loss_of_the_pipeline_over_a_mesh() -> None:
    told = ranks(4, verify_targets, limit_s=200)
    assert all(one == told[0] for one in told), "all ranks return the same"
    for found, name in zip(told[0], ("cross_entropy", "CrossEntropyLoss()", "mse_loss"), strict=True):
        assert found.equal and found.dtype is torch.float64 and found.loss == f"loss_fn {name!r}", found.offending
        effect = found.gradient_hook
        assert effect is not None and effect.gradient > 1e-2 and effect.loss == found.loss
        assert f", for loss_fn {name!r};" in str(effect)


class Locked:
    """The state of a hook that cannot be copied."""

    def __init__(self) -> None:
        self.group = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("it has a lock")


def verify_line(rank: int, n: int) -> tuple[Verification, list[str]]:
    """Return the finding for a pipeline of two ranks with compressed cuts, and the errors of bad calls."""
    x, told = torch.ones(8, 8).cumsum(0) / 8, []
    y = torch.arange(8) % 3
    options: dict[str, Any] = {"compress": "int8", "bucket_bytes": None, "loss_fn": F.cross_entropy}
    with compile_row("world", **options) as pipe:
        own = fxsplit.verify(pipe, x, target=y)
        assert own.equal and own.loss == "loss_fn 'cross_entropy'", own.offending
        before = [p.detach().clone() for p in pipe.parameters()]
        found = fxsplit.verify(pipe, x)
        assert all(torch.equal(a, b) for a, b in zip(before, pipe.parameters(), strict=True)), "compiled for nothing"
        pipe.compile_for(x)
        other = fxsplit.verify(pipe, x).compression
        assert other is not None and own.compression is not None and other.gradient != own.compression.gradient
        with pytest.raises(RanksDiffer, match=r"verify\(\) of pipeline 0") as differ:
            fxsplit.verify(pipe, x) if rank else pipe.state_dict()
        told.append(str(differ.value))
        assert fxsplit.verify(pipe, x).equal, "the next call works"
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    with (
        compile_row(mesh, gradient_hook=(Locked(), print)) as pipe,
        pytest.raises(InputError, match=r"a Locked cannot be copied \(it has a lock\): give its class a __deepcopy__"),
    ):
        fxsplit.verify(pipe, x)
    return found, told


def test_verify_over_a_line_of_ranks() -> None:
    found = ranks(2, verify_line)
    assert found[0][0] == found[1][0]
    for one, told in found:
        assert one.equal and one.stages == 2 and one.gradient_hook is None
        assert one.compression is not None and 1e-5 < one.compression.gradient < 5e-2
        assert len(told) == 1


class Weighted(nn.Module):
    """Returns a loss that weights of classes, in a buffer of the last stage, divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("classes", torch.tensor([1.0, 2.0, 5.0]))
        self.classes: Tensor

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        scores = self.last(torch.tanh(self.first(x)))
        return {"loss": nn.functional.cross_entropy(scores, labels, self.classes), "scores": scores}


def verify_weighted(rank: int, n: int) -> tuple[bool, bool]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 8), "labels": torch.arange(8) * 5 % 3}
    with fxsplit.compile(Weighted(), "world", example_inputs=batch, n_microbatches=4, passes=FAST) as pipe:
        verified = fxsplit.verify(pipe, batch)
        with torch.no_grad():
            loss = pipe.eval()(**batch)["loss"]
        return verified.equal, bool(loss.isfinite())


def test_verify_a_loss_that_weights_of_classes_divide() -> None:
    """The rank without the weights refused them by name."""
    assert ranks(2, verify_weighted) == [(True, True)] * 2


MODEL = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), (torch.randn(11, 8),)

def label():
    return (*make(), {}, torch.arange(11) % 3)
"""


def run_commands(rank: int, n: int, *given: list[str]) -> list[tuple[int, str, str]]:
    """Run commands as under torchrun. Returns their exit codes and output."""
    told = []
    for options in given:
        factory = "launched_models:label" if "--loss-fn" in options else "launched_models:make"
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
            code = main(["verify", factory, "--n-microbatches", "2", *options])
        told.append((code, out.getvalue(), error.getvalue()))
    return told


BAD = {
    "--devices 2": "--devices 2: under a launcher each rank is a device, so leave it out",
    "--pipelines 3": "--pipelines 3 of 2 ranks: give a number that divides them",
    "--gradient-hook fp16": "gradient_hook='fp16' adds gradients of data-parallel pipelines",
}


def test_the_command_under_a_launcher(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "launched_models.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    hook = ["--pipelines", "2", "--gradient-hook", "topk{share=0.1}", "--json"]
    loss = ["--pipelines", "2", "--loss-fn", "torch.nn.functional:cross_entropy", "--json"]
    first, second = ranks(2, run_commands, hook, [], loss, *(options.split() for options in BAD))
    assert [code for code, _, _ in first] == [code for code, _, _ in second] == [0, 0, 0, 2, 2, 2]
    assert not any(out for _, out, _ in second), "the first rank prints"
    told = json.loads(first[0][1])
    assert told["equal"] and told["stages"] == 1
    assert told["gradient_hook"]["how"] == "topk{share=0.1}" and 0 < told["gradient_hook"]["gradient"] < 1
    assert told["gradient_hook"]["lost"] < 1e-12
    assert "equal; " in first[1][1] and "2 stages" in first[1][1]
    assert json.loads(first[2][1])["loss"] == "loss_fn 'cross_entropy'"
    for said, *answers in zip(BAD.values(), first[3:], second[3:], strict=True):
        assert all(said in error for _, _, error in answers), answers


@pytest.mark.parametrize("option", [["--pipelines", "2"], ["--gradient-hook", "fp16"]])
def test_options_of_the_command_for_ranks_alone(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "tests.api.verify.test_approximations:make_pair", *option]) == 2
    assert f"{option[0]} is for several ranks: torchrun --nproc-per-node=4 -m fxsplit verify" in capsys.readouterr().err
