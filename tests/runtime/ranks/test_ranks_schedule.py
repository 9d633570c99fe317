"""Ranks run one searched schedule, and a schedule that is stated action by action, to the last digit as threads do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxsplit
from fxsplit.planner import Options
from fxsplit.schedule import Schedule, generate
from tests.runtime.ranks.compared import compare
from tests.support.models import FAST
from tests.support.ranks import ranks


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())))


def make_options(schedule: Any, n: int = 2) -> dict[str, Any]:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    best = schedule == "best"
    if schedule == "two stages":
        # Without replicas a V is the best plan.
        options = Options(model="forwarded", use_all=False)
        plan = fxsplit.plan(make_model(), n, example_inputs=x, n_microbatches=4, best=True, options=options)
        assert plan.machine is not None and len(plan.machine.homes) == 2 * n
        return {"loss_fn": F.mse_loss, "example_inputs": x, "plan": plan}
    return {"loss_fn": F.mse_loss, "example_inputs": x, "schedule": None if best else schedule, "best": best}


def run_schedule(rank: int, n: int, schedule: Any) -> tuple[int, str]:
    options = make_options(schedule, n)
    x = options["example_inputs"]
    schedules = []

    def step(pipe: fxsplit.Pipeline, i: int) -> Any:
        schedules.append(pipe.plan.schedule + pipe.plan.schedule_csv)
        rows = x[: (8, 8, 4)[i]]  # the last batch has fewer
        return pipe.step(rows, target=rows)

    count = compare(make_model(), n, step, options)
    assert len(set(schedules)) == 1, "ranks and threads have one schedule"
    return count, schedules[0]


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["search", "stated", "chosen", "best", "two stages"])
def test_ranks_run_one_schedule(name: str, n: int) -> None:
    stated = {"search": "search", "stated": generate("ZB-H2", n, 4), "chosen": None}.get(name, name)
    found = ranks(n, run_schedule, stated)
    # A rank with a replica of a stage holds its weights too.
    assert sum(count for count, _ in found) >= 3 * 12
    texts = {text for _, text in found}
    assert len(texts) == 1 and texts.pop()


class DropsOut(nn.Module):
    """Has another graph in evaluation, without its dropouts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.1, self.training)
        return x


def change_modes(rank: int, n: int) -> list[list[float]]:
    """Train, evaluate and train over ranks, and on rank 0 over threads too; return losses and outputs."""
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    found = []
    for devices in ("world", n) if rank == 0 else ("world",):
        with fxsplit.compile(DropsOut(), devices, passes=FAST, n_microbatches=4, **make_options("best")) as pipe:
            values = []
            for trains in (True, False, True):
                pipe.train(trains)
                torch.manual_seed(3)
                values.append(float(pipe.step(x, target=x) if trains else pipe(x).sum().detach()))
            found.append(values)
    return found


@pytest.mark.parametrize("n", [3])
def test_modes_of_the_best_plan_keep_the_weights_where_they_are(n: int) -> None:
    (over_ranks, over_threads), *others = ranks(n, change_modes)
    assert over_ranks == over_threads and others == [[over_threads]] * (n - 1)


def run_other(rank: int, n: int) -> str:
    schedule: Schedule = generate(("1F1B", "ZB-H1")[rank], n, 4)
    try:
        fxsplit.compile(make_model(), "world", passes=FAST, n_microbatches=4, **make_options(schedule))
    except fxsplit.FxsplitError as error:
        return type(error).__name__
    return ""


def test_ranks_with_other_schedules_are_refused() -> None:
    assert set(ranks(2, run_other)) == {"RanksDiffer"}
