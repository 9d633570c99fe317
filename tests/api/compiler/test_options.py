"""CompileOptions check themselves, and a pipeline for a comparison has the same options."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch._inductor import config

import fxsplit
from fxsplit import Costs, Machine
from fxsplit.api.compile import recompile_like
from fxsplit.api.compiler.options import Candidate, CompileOptions, load_costs
from fxsplit.errors import InputError, ScheduleError
from fxsplit.ir.facts.costs.compress import HOW, Compress
from fxsplit.runtime.stage.recompute import POLICIES, Policy
from fxsplit.schedule.generators.catalogue import ASYNCHRONOUS, RUNNABLE, SCHEDULES, SEARCH, ScheduleName, Scheduler
from tests.support.gpus import stand_in
from tests.support.models import FAST, Mlp
from tests.support.refusals import refused

EMPTY = Costs((), (), (), (), (), 1, "cpu", {})


def make(**options: Any) -> CompileOptions:
    return CompileOptions(**{"machine": Machine.of(["cpu"] * 2), "chain": fxsplit.DEFAULT, **options})


def test_options_are_frozen_and_checked_whenever_they_are_made() -> None:
    options = make(n_microbatches=4)
    with pytest.raises(FrozenInstanceError):
        options.n_microbatches = 0  # type: ignore[misc]
    with pytest.raises(InputError, match="n_microbatches=0"):
        replace(options, n_microbatches=0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n_microbatches": True}, InputError, "n_microbatches=True: give a number of at least 1, 'auto', or leave it"),
        ({"n_microbatches": "auto", "costs": EMPTY}, InputError, "'auto' measures microbatches of every size"),
        ({"loss_fn": nn.MSELoss}, InputError, "is no function or module"),
        ({"chunks": 3}, InputError, "chunks=3: give a dimension for each argument by its name"),
        ({"chunks": {"x": "all"}}, InputError, "chunks={'x': 'all'}: give the number of a dimension"),
        ({"chunks": {0: 1}}, InputError, "give the name of an argument"),
        ({"stages_per_device": 0}, InputError, "stages_per_device=0: give a number of at least 1"),
        ({"stages_per_device": True, "schedule": "auto"}, InputError, "stages_per_device=True: give a number"),
        ({"stages_per_device": 2}, ScheduleError, "2 stages a device; it is made for 1"),
        ({"schedule": ["1F1B"]}, InputError, "give the name of a schedule"),
        ({"dump": 3}, InputError, "dump=3: give the path of a folder"),
        ({"recompute": "sometimes"}, InputError, "recompute='sometimes': give one of never, plan"),
        ({"stage_backend": "fastest"}, InputError, "stage_backend='fastest' is none of torch.compile's"),
        ({"stage_backend": "cudagraphs"}, InputError, "stage_backend='cudagraphs' records CUDA graphs"),
        ({"schedule": "1f1b"}, ScheduleError, "did you mean '1F1B'"),
        ({"schedule": "Interleaved1F1B", "n_microbatches": 5}, ScheduleError, "5 microbatches do not divide"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**options)


def test_candidates_are_every_schedule_with_every_number() -> None:
    assert make().list_candidates(64) == [Candidate(Scheduler("1F1B", 2), 4)]
    assert make(n_microbatches=3).list_candidates(64) == [Candidate(Scheduler("1F1B", 2), 3)]
    assert [c.n_microbatches for c in make(n_microbatches="auto").list_candidates(64)] == [2, 4, 8, 16]
    both = make(schedule="auto", n_microbatches=4).list_candidates(64)
    assert [c.scheduler.name for c in both] == [s.name for s in make(schedule="auto").schedulers] and len(both) == 12
    # Chimera runs two pipelines of half the microbatches each, so it is no candidate for three.
    three = make(schedule="auto", n_microbatches=3).list_candidates(9)
    assert {c.n_microbatches for c in three} == {3} and "Chimera" not in [c.scheduler.name for c in three]


def test_costs_are_read_from_a_path_or_taken(tmp_path: Path) -> None:
    EMPTY.save(tmp_path / "costs.json")
    assert load_costs(EMPTY) is EMPTY and load_costs(None) is None
    read = load_costs(str(tmp_path / "costs.json"))
    assert read is not None and read.rows == 1
    with pytest.raises(InputError, match="costs=3: give a profile"):
        load_costs(3)  # type: ignore[arg-type]


def test_a_pipeline_to_compare_with_has_the_same_options_but_what_belongs_to_one_model() -> None:
    x = torch.randn(8, 8)
    loss = nn.MSELoss()
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    options: Any = {"passes": FAST, "deferred_batch_norm": True, "recompute": "always", "n_microbatches": 4}
    with fxsplit.compile(model, 2, example_inputs=x, **options) as pipe:
        other = recompile_like(pipe, deepcopy(model).double(), loss)
        mine, its = pipe.compiler.options, other.compiler.options
        assert (its.recompute, its.n_microbatches, its.chain, its.machine) == ("always", 4, mine.chain, mine.machine)
        assert its.loss_fn is loss and not its.deferred_batch_norm
        assert its.costs is pipe.costs and its.costs_by_name, "both get one plan"
    with fxsplit.compile(Mlp(), 2, example_inputs=x, passes=FAST, inference=True) as pipe:
        assert recompile_like(pipe, Mlp(), loss).compiler.options.costs is None, "they have no backwards"
    with pytest.raises(InputError, match="recompute='always' with inference=True: without backwards"):
        fxsplit.compile(Mlp(), 2, inference=True, recompute="always")
    pipedream = fxsplit.compile(Mlp(), 2, schedule="PipeDream")
    with pytest.raises(InputError, match="PipeDream does not train as"):
        recompile_like(pipedream, Mlp(), loss)


def test_inductor_is_refused_where_it_would_record_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 1)
    on_gpu, on_cpu = Machine.of(["cpu", "cuda:0"]), Machine.of(["cpu"] * 2)
    assert make(machine=on_gpu, stage_backend="inductor").stage_backend == "inductor"
    # monkeypatch would leave the option deleted.
    with config.patch({"triton.cudagraphs": True}):
        assert make(machine=on_cpu, stage_backend="inductor").stage_backend == "inductor"
        assert make(machine=on_gpu, stage_backend="aot_eager").stage_backend == "aot_eager"
        with refused(InputError, r"stage_backend='inductor' records CUDA graphs.*triton\.cudagraphs off"):
            make(machine=on_gpu, stage_backend="inductor")


def test_names_that_editors_complete_are_those_that_there_are() -> None:
    assert get_args(Policy) == tuple(POLICIES) and get_args(Compress) == HOW
    assert (*RUNNABLE, *ASYNCHRONOUS, SEARCH) == get_args(ScheduleName) == (*SCHEDULES, SEARCH)
