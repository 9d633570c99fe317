"""The pass `schedule` learns the plan's searched schedule, and text keeps it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.api.toolkit.parse_ir import parse_ir
from fxsplit.errors import ChainError, IRSyntaxError, ScheduleError
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.graph import IR
from fxsplit.passes.schedule import SchedulePlan
from fxsplit.schedule.torch_csv import parse_csv

CHAIN = "profile{repeats=1},augment,order,partition"


def plan_model(schedule: str = "search") -> IR:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.ReLU())))
    captured = fxsplit.capture(model, torch.randn(6, 8), devices=["cpu"] * 3, schedule=schedule, n_microbatches=6)
    return fxsplit.run(captured, CHAIN)


def test_it_learns_a_schedule() -> None:
    before = plan_model()
    after = SchedulePlan(memory=2)(before)
    plan, workload = after[Plan], after[Workload]
    schedule = parse_csv(plan.schedule_csv, "search")
    assert workload.schedule == plan.schedule == "search" and workload.schedule_csv == plan.schedule_csv
    assert max(schedule.peak_activations()) <= 2
    assert workload.in_flight[3] == schedule.peak_in_flight()
    plan.verify(after)
    # A plan that has a schedule keeps it, and options that would ask for another one are refused.
    again = SchedulePlan()(after)
    assert again[Plan].schedule_csv == plan.schedule_csv and again[Workload] == workload
    with pytest.raises(ScheduleError, match=r"schedule\{memory=1\}: the plan states its schedule already"):
        SchedulePlan(memory=1)(after)


def test_other_schedules_stay_as_they_are() -> None:
    for name in ("1F1B", "ZB-H1"):
        before = plan_model(name)
        assert SchedulePlan()(before) is before
        with pytest.raises(ScheduleError, match=f"its options are for schedule='search', and this one is '{name}'"):
            SchedulePlan(memory=2)(before)


def test_text_keeps_it() -> None:
    after = SchedulePlan(seed=3)(plan_model())
    text = str(after)
    read = parse_ir(text, "plan.ir")
    assert str(read) == text
    assert read[Plan].schedule_csv == after[Plan].schedule_csv
    assert [s.memory_bytes for s in read[Plan].stages] == [s.memory_bytes for s in after[Plan].stages]
    assert read[Workload].moments_of(3) == after[Workload].moments_of(3)
    damaged = text.replace("0F0,0F1", "0F0,0F0", 1)
    assert damaged != text
    with pytest.raises(IRSyntaxError, match="device 0, position 1, 0F0: done twice"):
        parse_ir(damaged, "plan.ir")


def test_options() -> None:
    for memory, seconds in ((-1.0, 0.0), (0.0, float("nan"))):
        with pytest.raises(ChainError, match="give a number of at least 0"):
            SchedulePlan(memory, seconds)
    with pytest.raises(ScheduleError, match=r"memory=0\.5"):
        SchedulePlan(memory=0.5)(plan_model())
