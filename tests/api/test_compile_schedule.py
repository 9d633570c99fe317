"""compile() with a searched schedule, a Schedule, and a file in torch's format trains as the unsplit model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import InputError, ScheduleError
from fxsplit.formats.plan_json import read_plan, save_plan
from fxsplit.schedule import Schedule, Times, generate, search, write_csv

FAST = "profile{repeats=1},augment,order,partition,emit"


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh()))).double()


def train(schedule: Any, **options: Any) -> tuple[Any, nn.Module]:
    """Train for three steps, the last on fewer rows; return the pipeline and its model."""
    model = make_model()
    given = {"passes": FAST, "n_microbatches": 6, "example_inputs": torch.zeros(12, 16).double(), **options}
    pipe = fxsplit.compile(model, ["cpu"] * 3, schedule=schedule, loss_fn=F.mse_loss, **given)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in batches():
        optimizer.zero_grad()
        pipe.step(x, target=x.flip(1))
        optimizer.step()
    return pipe, model


def batches() -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 16, generator=made, dtype=torch.float64) for rows in (12, 12, 6)]


def train_unsplit() -> nn.Module:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in batches():
        optimizer.zero_grad()
        F.mse_loss(model(x), x.flip(1)).backward()
        optimizer.step()
    return model


def assert_trained(model: nn.Module) -> None:
    for a, b in zip(model.parameters(), train_unsplit().parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_searched_schedule_trains_as_the_model() -> None:
    pipe, model = train("search")
    assert_trained(model)
    plan = pipe.plan
    assert plan.schedule == "search" and plan.schedule_csv
    assert str(pipe.ir).count("schedule") and [step.name for step in pipe.ir.steps].count("schedule") == 1
    measured, predicted = pipe.trace(batches()[0], target=batches()[0])
    assert [[s.action for s in row] for row in measured.spans] == [[s.action for s in row] for row in predicted.spans]


def test_a_saved_plan_replays_its_schedule(tmp_path: Path) -> None:
    pipe, _ = train("search", passes="profile{repeats=1},augment,order,partition,schedule{memory=2},emit")
    save_plan(pipe.plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").schedule_csv == pipe.plan.schedule_csv
    again, model = train("search", plan=tmp_path / "plan.json")
    assert again.plan.schedule_csv == pipe.plan.schedule_csv
    assert_trained(model)
    # Under another schedule only the stages are taken, with a warning.
    with pytest.warns(UserWarning, match="states the order of work of search with 6 microbatches, and this is ZB-H1"):
        other, _ = train("ZB-H1", plan=tmp_path / "plan.json")
    assert other.plan.schedule == "ZB-H1" and not other.plan.schedule_csv
    assert [s.nodes for s in other.plan.stages] == [s.nodes for s in pipe.plan.stages]


def test_a_schedule_is_run_as_it_is(tmp_path: Path) -> None:
    two = search(Times.unit(6), n_devices=3, n_microbatches=6, stages_per_device=2, memory=3).schedule
    for schedule in (generate("ZB-H2", 3, 6), two):
        pipe, model = train(schedule, n_microbatches=None)
        assert_trained(model)
        assert pipe.plan.n_microbatches == 6 and len(pipe.plan.stages) == schedule.n_stages
        write_csv(schedule, tmp_path / "order.csv")
        for path in (tmp_path / "order.csv", str(tmp_path / "order.csv")):
            from_file, model = train(path)
            assert_trained(model)
            assert from_file.plan.schedule == "order"
            assert from_file.plan.schedule_csv == pipe.plan.schedule_csv


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        (generate("1F1B", 2, 6), {}, "is for 2 devices, and there are 3"),
        (generate("1F1B", 3, 4), {}, "is for 4 microbatches in 3 stages, not for 6 in 3"),
        (generate("1F1B", 3, 6), {"stages_per_device": 2}, "says where its stages are"),
        (generate("PipeDream", 3, 6), {}, "does not train in one step a batch"),
        ("missing.csv", {}, "cannot read the schedule 'missing.csv'"),
        (3, {}, "give a name, 'auto', a Schedule or a .csv file"),
        ("search", {"stages_per_device": 2}, "search: 2 stages a device: plans with a searched schedule have one"),
        (generate("Chimera", 4, 4), {"devices": 4, "n_microbatches": 4}, "has stages on several devices"),
        ("serch", {}, "did you mean"),
        ("search", {"inference": True}, "there is one schedule"),
    ],
)
def test_refused(schedule: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, ScheduleError), match=message):
        given = {"n_microbatches": 6, **options}
        fxsplit.compile(make_model(), ["cpu"] * given.pop("devices", 3), schedule=schedule, **given)


def test_an_illegal_schedule_is_refused() -> None:
    legal = generate("1F1B", 3, 6)
    rows = (legal.actions[0][::-1], *legal.actions[1:])
    with pytest.raises(ScheduleError, match="1F1B: device 0"):
        fxsplit.compile(make_model(), ["cpu"] * 3, schedule=Schedule("1F1B", 6, legal.homes, rows))


def test_verify_takes_a_searched_pipeline() -> None:
    pipe, _ = train("search")
    x = batches()[0]
    assert fxsplit.verify(pipe, x, target=x).equal
