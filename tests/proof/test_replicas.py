"""Stages on several devices: microbatches are dealt out, gradients summed once, and results are the unsplit model's."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from functools import cache
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.api.verify.compare import compare, run_pipeline_step, run_unsplit_step
from fxsplit.errors import InputError, PlanError, ScheduleError
from fxsplit.schedule import Times, simulate, verify
from fxsplit.schedule.generators.synchronous import REPLICABLE, count_in_flight, schedule_replicas
from tests.support.models import FAST, Mlp, Residual
from tests.support.own_passes import partition_over_replicas

TOLERANCE = 1e-10


def chain(counts: Sequence[int]) -> Any:
    return fxsplit.DEFAULT.replace("partition", partition_over_replicas(counts))


def case(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    if name == "residual":
        return Residual().double(), torch.randn(11, 3, 6, 6, dtype=torch.float64), torch.randint(0, 5, (11,))
    return Mlp(layers=6).double(), torch.randn(11, 8, dtype=torch.float64), torch.randint(0, 3, (11,))


def machine(counts: Sequence[int], shared: bool) -> fxsplit.Machine:
    """Return a machine whose replicas share the weights, or have copies, as on different GPUs.

    To torch, "cpu:0" and "cpu" are different devices although the memory is the same.
    """
    first = {sum(counts[:i]) for i in range(len(counts))}
    places = [torch.device("cpu" if shared or d in first else "cpu:0") for d in range(sum(counts))]
    return fxsplit.Machine.of([fxsplit.Device(f"cpu:{d}", place) for d, place in enumerate(places)], bytes_per_s=inf)


@pytest.fixture(params=[True, False], ids=["shared", "copied"])
def shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@cache
def profile(name: str) -> fxsplit.Costs:
    model, x, _ = case(name)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=5, passes=FAST) as pipe:
        return pipe.costs


def assert_trains_as(pipe: fxsplit.Pipeline, unsplit: nn.Module, x: Tensor, y: Tensor, n_microbatches: int) -> None:
    """Two steps of an optimizer, so that copies must follow."""
    for _ in range(2):
        found = run_pipeline_step(pipe, [x], y)
        expected = run_unsplit_step(unsplit, [x], y, F.cross_entropy, n_microbatches)
        assert compare(found, expected).largest <= TOLERANCE, compare(found, expected)
        for m in (pipe.model, unsplit):
            torch.optim.SGD(m.parameters(), 0.1).step()
            m.zero_grad()


@pytest.mark.parametrize("schedule", REPLICABLE)
@pytest.mark.parametrize("counts", [(1, 3, 1), (2, 1), (1, 2), (3,)])
@pytest.mark.parametrize("name", ["residual", "mlp"])
def test_replicated_stages_are_the_unsplit_model(
    name: str, counts: tuple[int, ...], schedule: str, shared: bool
) -> None:
    """Two optimizer steps, so that copies must follow; batch norm's statistics follow the order of microbatches."""
    model, x, y = case(name)
    unsplit = copy.deepcopy(model)
    options: Any = {"n_microbatches": 5, "schedule": schedule, "passes": chain(counts), "costs": profile(name)}
    with fxsplit.compile(model, machine(counts, shared), loss_fn=F.cross_entropy, **options) as pipe:
        pipe.compile_for(x)
        assert [len(s.devices) for s in pipe.plan.stages] == list(counts)
        assert_trains_as(pipe, unsplit, x, y, 5)
        assert list(pipe.state_dict()) == list(unsplit.state_dict())
        F.cross_entropy(pipe(x), y).backward()
        pieces = zip(x.split([3, 2, 2, 2, 2]), y.split([3, 2, 2, 2, 2]), strict=True)
        (sum(F.cross_entropy(unsplit(a), b, reduction="sum") for a, b in pieces) / 11).backward()  # type: ignore[union-attr]
        for a, b in zip(model.parameters(), unsplit.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=TOLERANCE, atol=TOLERANCE)
        pipe.eval()
        unsplit.eval()
        torch.testing.assert_close(pipe(x), unsplit(x), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["residual", "mlp"])
@pytest.mark.parametrize("devices", [2, 4])
def test_chimera_is_the_unsplit_model(name: str, devices: int, shared: bool) -> None:
    """Every stage lives on two devices, and each has half of the microbatches."""
    model, x, y = case(name)
    unsplit = copy.deepcopy(model)
    options: Any = {"n_microbatches": 4, "schedule": "Chimera", "costs": profile(name), "loss_fn": F.cross_entropy}
    with fxsplit.compile(model, machine([devices // 2] * 2, shared), **options) as pipe:
        assert_trains_as(pipe, unsplit, x, y, 4)


def test_replicas_deal_with_less_memory() -> None:
    """A stage holds as many microbatches as keep its replicas busy, or as fit."""
    homes = ((0,), (1, 2, 3), (4,))
    assert count_in_flight(homes) == [5, 2, 1] and count_in_flight(((0,), (1,), (2,))) == [3, 2, 1]
    fast = schedule_replicas("1F1B", homes, 12, count_in_flight(homes))
    slow = schedule_replicas("1F1B", homes, 12, [2, 1, 1])
    for schedule in (fast, slow):
        verify(schedule)
    assert fast.peak_in_flight() == (5, 2, 1) and slow.peak_in_flight() == (2, 1, 1)
    times = Times([1.0, 3.0, 1.0], [2.0, 6.0, 2.0])
    assert simulate(fast, times).step_ms < simulate(slow, times).step_ms
    with pytest.raises(ScheduleError, match="Interleaved1F1B: the plan gives a stage several devices"):
        schedule_replicas("Interleaved1F1B", homes, 12, count_in_flight(homes))


class Counts(nn.Module):
    """Writes a buffer of its own."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1.0)
        return torch.tanh(self.b(torch.tanh(self.a(x)))) * self.seen


class Renorm(nn.BatchNorm1d):
    """Normalises by its running statistics, in training too."""

    def forward(self, input: Tensor) -> Tensor:
        super().forward(input)
        assert self.running_mean is not None
        return input - self.running_mean


def test_what_replicas_cannot_write() -> None:
    x = torch.randn(8, 8)
    with pytest.raises(PlanError, match="stage 0 has several devices, which would all write buffer 'seen'"):
        fxsplit.compile(Counts(), ["cpu"] * 2, example_inputs=x, n_microbatches=2, passes=chain((2,)))
    model = nn.Sequential(nn.Linear(8, 8), Renorm(8), nn.Linear(8, 8))
    options: Any = {"example_inputs": x, "n_microbatches": 2, "passes": chain((2,))}
    with (
        fxsplit.compile(model, ["cpu"] * 2, **options) as pipe,
        pytest.raises(InputError, match="Renorm computes with its running statistics"),
    ):
        pipe(x)
    # With schedule="auto", Chimera is skipped for a model with stages that cannot be replicated.
    auto: Any = {"example_inputs": x, "n_microbatches": 2, "schedule": "auto", "loss_fn": F.mse_loss}
    with fxsplit.compile(Counts(), ["cpu"] * 2, **auto) as pipe:
        pipe.step(x, target=x)


def test_a_failing_replica_names_its_device() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    options: Any = {"n_microbatches": 4, "passes": chain((1, 2)), "loss_fn": F.mse_loss}
    with fxsplit.compile(model, ["cpu"] * 3, **options) as pipe:
        x = torch.randn(8, 8)
        pipe.step(x, target=x)

        def fail(module: nn.Module, args: Any) -> None:
            if args[0].shape == (2, 8) and threading.current_thread().name.endswith("2"):
                raise ValueError("not here")

        handle = model[3].register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match=r"not here \(in stage 1 of 2 on cpu:2, forward of microbatch [13]"):
            pipe.step(x, target=x)
        handle.remove()
        pipe.step(x, target=x)
