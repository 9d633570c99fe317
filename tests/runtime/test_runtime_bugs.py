"""Wrong gradients and statistics that once were: under halved backwards, checkpointing and deferred batch norm."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.api.compare import compare, run_pipeline_step, run_unsplit_step
from fxsplit.cli import main as cli
from fxsplit.errors import ScheduleError
from fxsplit.runtime.stage.run import Saved, backward
from fxsplit.runtime.stage.split_backward import compute_input_gradients, compute_weight_gradients
from fxsplit.schedule.action import Action
from fxsplit.schedule.torch_csv import read_csv
from fxsplit.torch_internals.grad_sums import Sums
from tests.models import FAST

HALVED = ["ZB-H1", "ZBVZeroBubble"]
Loss = Callable[[nn.Module], Callable[[Any, Any], Tensor]]


def mean_square(model: nn.Module) -> Callable[[Any, Any], Tensor]:
    return F.mse_loss


def largest_difference(
    model: nn.Module, schedule: str, checkpoint: str = "never", loss: Loss = mean_square, **options: Any
) -> float:
    torch.manual_seed(1)
    x = torch.randn(8, 8, dtype=torch.float64)
    ours, theirs = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    given: dict[str, Any] = {"passes": FAST, "n_microbatches": 4, "checkpoint": checkpoint, **options}
    with fxsplit.compile(ours, ["cpu"] * 2, loss_fn=loss(ours), schedule=schedule, **given) as pipe:
        return compare(run_pipeline_step(pipe, [x], x), run_unsplit_step(theirs, [x], x, loss(theirs), 4)).largest


class Ends(nn.Module):
    """A weight read by the first layer and by the last: it crosses the cut as a value."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8) / 3)
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(F.linear(x, self.w)))))
        return F.linear(torch.tanh(self.c(h)), self.w)


@pytest.mark.parametrize("schedule", HALVED)
def test_a_weight_that_two_stages_read(schedule: str) -> None:
    assert largest_difference(Ends(), schedule) < 1e-10


def test_a_weight_that_is_handed_on() -> None:
    x, w = torch.randn(3, 2), torch.randn(2, 2, requires_grad=True)
    gradients = [torch.ones(3, 2), torch.full((2, 2), 100.0)]
    once, twice = Sums(), Sums()
    once.add(backward(Saved((x,), (F.linear(x, w), w)), gradients, [w])[1])
    _, early, rest = compute_input_gradients(Saved((x,), (F.linear(x, w), w)), gradients, [w])
    twice.add(early)
    compute_weight_gradients(rest, twice)
    assert torch.equal(once.totals[w], twice.totals[w]) and float(once.totals[w].mean()) > 90


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", HALVED)
def test_hooks_on_activations_run_once(schedule: str, checkpoint: str) -> None:
    def double(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * 2)

    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    for layer in model:
        layer[0].register_forward_hook(double)  # type: ignore[index]
    assert largest_difference(model, schedule, checkpoint) < 1e-10


class Hooking(nn.LayerNorm):
    """Stays whole, and puts a hook on what it makes."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(self.doubled)
        return out

    def doubled(self, gradient: Tensor) -> Tensor:
        Hooking.calls += 1
        return gradient * 2


@pytest.mark.parametrize("schedule", HALVED)
def test_hooks_that_a_module_puts_on_activations_itself_run_once(schedule: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), Hooking(8)) for _ in range(4)))
    passes = "".join(f"leaf{{path={i}.1}}," for i in range(4)) + FAST
    assert largest_difference(model, schedule, passes=passes) < 1e-10
    x = torch.randn(8, 8)
    options: Any = {"n_microbatches": 4, "passes": passes, "loss_fn": F.mse_loss, "example_inputs": x}
    with fxsplit.compile(model, 2, schedule=schedule, **options) as pipe:
        Hooking.calls = 0
        pipe.step(x, target=x)
        assert Hooking.calls == 4 * 4, "layers x microbatches"


class Heads(nn.Module):
    """Two outputs, of which a loss may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.aux = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return h, self.aux(h)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", HALVED)
def test_a_weight_that_only_the_loss_reads(schedule: str, checkpoint: str) -> None:
    def loss(model: Any) -> Callable[[Any, Any], Tensor]:
        return lambda o, t: F.mse_loss(o[0], t) + 0.1 * model.aux.weight.square().sum()

    assert largest_difference(Heads(), schedule, checkpoint, loss) < 1e-10


class Counting(nn.Module):
    """A buffer that every call writes and multiplication saves for backward."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1.0)
        out: Tensor = self.b(torch.tanh(self.a(x)) * self.count)
        return out


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZB-H1"])
def test_a_checkpointed_stage_sees_buffers_as_they_were(schedule: str) -> None:
    assert largest_difference(Counting(), schedule, "always") < 1e-10


SPACE: dict[int, Tensor] = {}


class Reused(torch.autograd.Function):
    """Returns its weight's gradient in memory that it uses again; what it keeps, its backward needs once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.kept = x.detach(), w.detach()
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.kept
        del ctx.kept
        space = SPACE.setdefault(w.data_ptr(), torch.empty_like(w))
        torch.sum(gradient * x, 0, out=space)
        return gradient * w, space


def reused(x: Tensor, w: Tensor) -> Tensor:
    out: Tensor = Reused.apply(x, w)  # type: ignore[no-untyped-call]
    return out


torch.fx.wrap("reused")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = reused(torch.tanh(layer(x)), scale)
        return x


@pytest.mark.parametrize("schedule", ["1F1B", *HALVED])
def test_a_function_may_use_its_memory_again_and_run_backward_once(schedule: str) -> None:
    assert largest_difference(Scaled(), schedule) < 1e-10


def test_statistics_that_begin_to_move_later_move_once() -> None:
    found = []
    for checkpoint in ("never", "always"):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.0), nn.Linear(8, 8)), torch.randn(8, 8)
        options: Any = {"n_microbatches": 4, "loss_fn": F.mse_loss, "passes": FAST, "example_inputs": x}
        with fxsplit.compile(model, ["cpu"] * 2, checkpoint=checkpoint, **options) as pipe:
            pipe.step(x, target=x)
            model[1].momentum = 0.1  # type: ignore[assignment]
            pipe.step(x, target=x)
        found.append(list(model.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and float(found[0][0].abs().max()) > 0


class Twice(nn.Module):
    """One batch norm called twice, once by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(input=self.b(self.norm(self.a(x))))
        return out


def test_a_deferred_batch_norm_that_is_called_twice_counts_twice() -> None:
    torch.manual_seed(0)
    model, x = Twice().double(), torch.randn(8, 8, dtype=torch.float64)
    seen: list[Tensor] = []
    other = copy.deepcopy(model)
    other.norm.register_forward_pre_hook(
        lambda m, a, k: seen.append((a[0] if a else k["input"]).detach()), with_kwargs=True
    )
    for piece in x.chunk(2):
        other(piece)
    mean = torch.zeros(8, dtype=torch.float64)
    for call in (0, 1):
        mean = 0.9 * mean + 0.1 * torch.cat(seen[call::2]).mean(0)
    options: Any = {"n_microbatches": 2, "loss_fn": F.mse_loss, "passes": FAST, "deferred_batch_norm": True}
    with fxsplit.compile(model, ["cpu"], **options) as pipe:
        pipe.step(x, target=x)
    assert int(model.norm.num_batches_tracked) == 2  # type: ignore[arg-type]
    assert torch.allclose(model.norm.running_mean, mean, rtol=1e-10)  # type: ignore[arg-type]


def test_a_failed_step_leaves_deferred_statistics_alone() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), torch.randn(8, 8)
    calls: list[int] = []

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("not now")
        return F.mse_loss(outputs, target)

    options: Any = {"n_microbatches": 4, "loss_fn": loss, "passes": FAST, "deferred_batch_norm": True}
    with fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, **options) as pipe:
        before = [b.clone() for b in model.buffers()]
        with pytest.raises(ValueError, match="not now"):
            pipe.step(x, target=x)
        assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
        pipe.step(x, target=x)
        assert int(model[1].num_batches_tracked) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "99999999999F0,99999999999B0",
        "0F" + "9" * 5000,
        "(" * 6000 + "0F0" + ")OVERLAP_F_B" * 6000,
        "1F0,1B0",
        "0F9999999",
    ],
    ids=["huge stage", "huge number", "nested", "no stage 0", "huge microbatch"],
)
def test_absurd_schedule_files_are_refused_at_once(text: str, tmp_path: Path) -> None:
    path = tmp_path / "absurd.csv"
    path.write_text(text + "\n")
    with pytest.raises(ScheduleError):
        read_csv(path)


def test_absurd_numbers_are_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ScheduleError):
        Action.parse("0F12345678")
    assert cli.main(["simulate", "--devices", "2", "--n-microbatches", "9" * 20]) == 2
    assert "actions, more than 1000000: give fewer microbatches" in capsys.readouterr().err
    from tests.cli.test_plan import chain

    chain([1, 1]).save(tmp_path / "profile.json")
    assert cli.main(["plan", str(tmp_path / "profile.json"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    for change in ({"n_microbatches": 10**30}, {"rows": float("inf")}, {"ideals": 1.5}, {"n_microbatches": True}):
        (tmp_path / "plan.json").write_text(json.dumps(plan | change))
        assert cli.main(["simulate", "--plan", str(tmp_path / "plan.json")]) == 2
        assert "it must be a whole number" in capsys.readouterr().err


def test_hooks_of_a_deferred_batch_norm_are_given_the_module() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    seen: list[tuple[str, nn.Module]] = []
    model[1].register_forward_pre_hook(lambda m, args: seen.append(("before", m)))
    model[1].register_forward_hook(lambda m, args, kwargs, out: seen.append(("after", m)), with_kwargs=True)
    model[1].register_full_backward_hook(lambda m, inputs, outputs: seen.append(("back", m)))
    x = torch.randn(8, 8)
    options: Any = {"n_microbatches": 2, "loss_fn": F.mse_loss, "passes": FAST, "deferred_batch_norm": True}
    with fxsplit.compile(model, 2, example_inputs=x, **options) as pipe:
        seen.clear()
        pipe.step(x, target=x)
    assert all(m is model[1] for _, m in seen)
    assert sorted(what for what, _ in seen) == ["after"] * 2 + ["back"] * 2 + ["before"] * 2
