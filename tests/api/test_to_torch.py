"""torch's own runtime runs the stages with the pipeline's gradients; anything that it cannot run is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit import IR, Pins
from fxsplit.api.to_torch import LEAST_TORCH
from fxsplit.errors import InputError, NotExportable
from fxsplit.schedule.generators.catalogue import ScheduleName
from tests.support.models import FAST, Buffers, LateReader, ManyInputs, Mlp, Residual
from tests.support.ranks import ranks

pytestmark = pytest.mark.skipif(torch.__version__ < LEAST_TORCH, reason="torch's own runtime fails, and is refused")


class Sizes(nn.Module):
    """Attention that reads rows and lengths from the input, and uses them after the input is gone; a mask of flags."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, width), nn.Linear(width, 11)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.more = nn.Linear(width, width)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        rows, length = ids.size()
        x = self.embed(ids)
        q, k, v = (self.qkv(x).view(rows, length, 3, -1)).unbind(2)
        keep = mask.view(rows, 1, length)
        scores = (q @ k.transpose(1, 2)).masked_fill(~keep, -30.0)
        x = self.out(scores.softmax(-1) @ v).reshape(rows * length, -1)
        x = torch.tanh(self.more(x)) * x.shape[1]
        result: Tensor = self.head(x.view(rows, length, -1))
        return result


def weigh_all(outputs: Any, target: Tensor) -> Tensor:
    leaves = outputs.values() if isinstance(outputs, dict) else [outputs]
    return torch.stack(
        [(v * target.view(-1, *[1] * (v.ndim - 1))).pow(2).mean() for v in leaves if isinstance(v, Tensor)]
    ).sum()


weigh_all.reduction = "mean"  # type: ignore[attr-defined]


def make_case(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Tensor]:
    """Return a model, its arguments, and a target, for 8 rows in double precision."""
    torch.manual_seed(3)
    target = torch.rand(8, dtype=torch.float64)
    plain = torch.randn(8, 8, dtype=torch.float64)
    ids = torch.randint(10, (8, 5))
    if name == "sizes":
        return Sizes().double(), (ids, torch.rand(8, 5) < 0.7), {}, target
    if name == "residual":
        return Residual().double(), (torch.randn(8, 3, 4, 4, dtype=torch.float64),), {}, target
    if name == "inputs":
        batch = {"ids": ids, "extra": torch.randn(8, 5, 8, dtype=torch.float64)}
        return ManyInputs().double(), (batch,), {"mask": torch.rand(8, 5).round().double()}, target
    made: dict[str, Callable[[], nn.Module]] = {"mlp": lambda: Mlp(7), "late": LateReader, "buffers": Buffers}
    return made[name]().double(), (plain,), {}, target


def compile_case(name: str, n: int, schedule: ScheduleName, costs: str | None = None, **options: Any) -> Any:
    model, args, kwargs, target = make_case(name)
    example = {"batch": args[0], **kwargs} if kwargs else args
    options = {"loss_fn": weigh_all, "n_microbatches": 4, "passes": FAST, "costs": costs, **options}
    pipe = fxsplit.compile(model, ["cpu"] * n, example_inputs=example, schedule=schedule, **options)
    return pipe, args, kwargs, target


def train_in_torch(rank: int, n: int, name: str, schedules: list[ScheduleName], costs: str) -> dict[str, Any]:
    """Return for each schedule the losses, gradients and buffers of two steps by torch's runtime in this rank."""
    found: dict[str, Any] = {}
    for schedule in schedules:
        pipe, args, kwargs, target = compile_case(name, n, schedule, costs)
        made = pipe.to_torch_stages()
        losses = [made.step(*args, target=target, **kwargs) for _ in range(2)]
        own: dict[str, Tensor] = {}
        for stage in made.stages:
            own |= dict(stage.submod.named_parameters()) | dict(stage.submod.named_buffers())
        state = {k: (v.grad if isinstance(v, nn.Parameter) else v) for k, v in own.items()}
        found[schedule] = losses, {k: v.detach().clone() for k, v in state.items() if v is not None}
        pipe.close()
    return found


THERE_AND_BACK = ["ZBVZeroBubble", "V-Half", "V-Min", "DualPipeV"]
ONE, TWO = ["GPipe", "1F1B", "ZB-H1"], ["LoopedBFS", "Interleaved1F1B", *THERE_AND_BACK]


@pytest.mark.parametrize(
    ("n", "name", "schedules"),
    [
        (2, "sizes", ONE),
        (3, "mlp", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]),
        pytest.param(3, "mlp", [*ONE, *TWO], marks=pytest.mark.long),
        (2, "mlp", TWO),
        (2, "residual", [*ONE, "ZBVZeroBubble"]),
        (2, "inputs", ["1F1B", "ZB-H1"]),
        (2, "late", ["1F1B", "ZBVZeroBubble"]),
        (2, "buffers", ["1F1B"]),
    ],
)
def test_gradients_are_those_of_the_pipeline_here(
    n: int, name: str, schedules: list[ScheduleName], tmp_path: Path
) -> None:
    """Two steps, and their gradients add up: with the same plan, and with the names of the model."""
    costs = str(tmp_path / "costs.json")
    pipe, *_ = compile_case(name, n, "1F1B")
    pipe.costs.save(costs)
    pipe.close()
    found = ranks(n, train_in_torch, name, schedules, costs)
    for schedule in schedules:
        here, args, kwargs, target = compile_case(name, n, schedule, costs)
        losses = [here.step(*args, target=target, **kwargs) for _ in range(2)]
        told = [rank[schedule][0] for rank in found]
        # The rank of the last stage has the loss: the first rank, if stages go there and back.
        last = (
            here.plan.stages[-1].devices[0]
            if len(here.plan.stages) == n
            else (0 if schedule in THERE_AND_BACK else n - 1)
        )
        torch.testing.assert_close(torch.stack(told[last]), torch.stack(losses), rtol=1e-12, atol=0)
        assert all(loss is None for rank, each in enumerate(told) if rank != last for loss in each)
        state = {k: v for rank in found for k, v in rank[schedule][1].items()}
        own = {k: p.grad for k, p in here.named_parameters()} | dict(here.named_buffers())
        assert set(state) == {k for k, v in own.items() if v is not None}
        for key, value in state.items():
            assert torch.allclose(value, own[key], rtol=1e-12, atol=1e-15), f"{schedule}: {key}"
        here.close()


class Dropping(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


class Tying(Mlp):
    def __init__(self) -> None:
        super().__init__(width=8, classes=8)
        first: Any = self.layers[0]
        self.layers[3].weight = first.weight


class Reading(Mlp):
    """Reads a number in the first stage from a weight, and multiplies by it in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        high = self.factor.item()
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        result: Tensor = self.layers[-1](x) * high
        return result


def pin_ends(ir: IR) -> IR:
    """Put both layers that share a weight into their own stages."""
    return Pins.add(ir, {"layers.0": 0, "layers.3": 1})


def pin_reading(ir: IR) -> IR:
    """Read the number in the first stage, and use it in the second."""
    return Pins.add(ir, {"item": 0, "layers.3": 1})


def compile_alike(rank: int, folder: str, model: nn.Module, n: int, example: Tensor, options: dict[str, Any]) -> Any:
    """Return the pipeline of a plan that all ranks have, made with the times of rank 0."""
    costs = str(Path(folder, "costs.json"))
    dist.barrier()
    if rank == 0:
        with fxsplit.compile(copy.deepcopy(model), ["cpu"] * n, example_inputs=example, **options) as pipe:
            pipe.costs.save(costs)
    dist.barrier()
    return fxsplit.compile(model, ["cpu"] * n, example_inputs=example, costs=costs, **options)


def refuse(rank: int, n: int, folder: str) -> dict[str, str]:
    """Return the error for each pipeline that torch's runtime cannot run."""
    x, target = torch.randn(8, 8, dtype=torch.float64), torch.rand(8, dtype=torch.float64)
    loss_fn: Any = weigh_all
    made: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "replicas": (Mlp(4), {"schedule": "Chimera"}),
        "versions": (Mlp(4), {"schedule": "PipeDream"}),
        "tied": (Tying(), {"passes": fxsplit.DEFAULT.before("profile", pin_ends)}),
        "rows": (Mlp(4), {"n_microbatches": 3}),
        "draws": (Dropping(4), {}),
        "values": (Reading(), {"passes": fxsplit.DEFAULT.before("profile", pin_reading)}),
        "ranks": (Mlp(6), {"devices": 3}),
        "recompute": (Mlp(4), {"recompute": "always"}),
        "deferred": (Residual(), {"deferred_batch_norm": True, "x": torch.randn(8, 3, 4, 4, dtype=torch.float64)}),
        "backend": (Mlp(4), {"stage_backend": "eager"}),
        "inference": (Mlp(4), {"inference": True}),
        "no loss": (Mlp(4), {"loss_fn": None}),
    }
    found = {}
    for name, (model, options) in made.items():
        devices, given = options.pop("devices", n), options.pop("x", x)
        options = {"loss_fn": loss_fn, "n_microbatches": 4, "passes": FAST, **options}
        with compile_alike(rank, folder, model.double(), devices, given, options) as pipe:
            try:
                pipe.to_torch_stages()
            except NotExportable as error:
                found[name] = str(error)
    with fxsplit.compile(Mlp(4).double(), ["cpu"] * n, loss_fn=loss_fn) as pipe:
        try:
            pipe.to_torch_stages()
        except InputError as error:
            found["uncompiled"] = str(error)
    # Errors that only a run shows.
    model = Mlp(4, classes=8 + 4 * rank).double()
    with fxsplit.compile(model, ["cpu"] * n, example_inputs=x, passes=FAST, loss_fn=loss_fn) as pipe:
        try:
            pipe.to_torch_stages()
        except InputError as error:
            found["agreement"] = str(error)
    assert target is not None
    return found


def test_what_torch_cannot_run_is_refused_by_name(tmp_path: Path) -> None:
    first, second = ranks(2, refuse, str(tmp_path))
    assert first == second
    expected = {
        "replicas": "stage 0 has 2 replicas",
        "versions": "keeps several versions of weights",
        "tied": "is tied: stages 0 and 1 have it",
        "rows": "8 rows do not divide into 3 microbatches, and torch's are all equal: give 6 rows",
        "draws": "draws random numbers (dropout)",
        "values": "crosses into stage 1, and it is computed there from no tensor's shape",
        "ranks": "the plan has 3 devices and the group 2 ranks",
        "recompute": "stage 0 recomputes",
        "deferred": "batch norms are deferred",
        "backend": "stage_backend=",
        "inference": "trains nothing",
        "no loss": "compile with loss_fn=",
        "uncompiled": "nothing is compiled yet",
        "agreement": "rank 1 has other stages than rank 0",
    }
    assert set(first) == set(expected)
    for name, text in expected.items():
        assert text in first[name], f"{name}: {first[name]}"


def mean_silently(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs, target, ignore_index=0)


def sum_silently(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs, target, reduction="sum")


def train_with_losses(rank: int, n: int, costs: str) -> dict[str, Any]:
    """Return the loss by torch's runtime for several loss functions, or its error."""
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    even, uneven = torch.tensor([1, 0] * 4), torch.tensor([1, 0, 0, 1, 1, 1, 2, 2])
    cases: dict[str, tuple[Any, Tensor]] = {
        "mean": (F.cross_entropy, even),
        "sum": (nn.CrossEntropyLoss(reduction="sum"), even),
        "even": (mean_silently, even),
        "uneven": (mean_silently, uneven),
        "sum unsaid": (sum_silently, even),
    }
    found: dict[str, Any] = {}
    for name, (loss_fn, target) in cases.items():
        torch.manual_seed(0)
        model = Mlp(4).double()
        options: dict[str, Any] = {"n_microbatches": 4, "passes": FAST, "costs": costs, "loss_fn": loss_fn}
        with fxsplit.compile(model, ["cpu"] * n, example_inputs=x, **options) as pipe:
            made = pipe.to_torch_stages()
            # Only the last stage's rank knows the error of a loss; the other rank would wait for its gradients.
            if name in ("uneven", "sum unsaid"):
                if rank == n - 1:
                    found[name] = refuse_targets(made.schedule, loss_fn, target)
                continue
            loss = made.step(x, target=target)
            found[name] = None if loss is None else float(loss), float(made.loss_scale)
        dist.barrier()
    return found


def refuse_targets(schedule: Any, loss_fn: Any, target: Tensor) -> str:
    """Call the loss that torch's runtime calls, for each microbatch; return its error."""
    call = schedule._loss_fn
    outputs = torch.randn(8, 3, dtype=torch.float64)
    try:
        for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
            call((outputs[rows],), target[rows])
    except InputError as error:
        return str(error)
    return "nothing"


def test_losses_are_scaled_as_they_say_and_refused_where_microbatches_weigh_otherwise(tmp_path: Path) -> None:
    costs = str(tmp_path / "costs.json")
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = Mlp(4).double()
    with fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, passes=FAST, n_microbatches=4) as pipe:
        pipe.costs.save(costs)
    _, last = ranks(2, train_with_losses, costs)
    even = torch.tensor([1, 0] * 4)
    torch.manual_seed(0)
    outputs = Mlp(4).double()(x).detach()
    assert last["mean"] == (pytest.approx(float(F.cross_entropy(outputs, even)), rel=1e-12), 0.25)
    assert last["sum"] == (pytest.approx(float(F.cross_entropy(outputs, even, reduction="sum")), rel=1e-12), 1.0)
    assert last["even"] == (pytest.approx(float(mean_silently(outputs, even)), rel=1e-12), 0.25)
    assert "1 for one microbatch and 2 for another" in last["uneven"]
    assert "set loss_fn.reduction = 'sum'" in last["sum unsaid"]
