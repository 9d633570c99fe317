"""`schedule="auto"` and `n_microbatches="auto"` take the fastest candidate by simulation that fits in memory."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxsplit
from fxsplit.api.compiler.candidates import choose_candidate
from fxsplit.api.compiler.lowering import capture_model
from fxsplit.api.compiler.microbatch_count import list_microbatch_counts
from fxsplit.api.compiler.options import Candidate, CompileOptions, list_schedulers
from fxsplit.ir.chain import parse_chain
from fxsplit.ir.facts.capture.call import Call
from fxsplit.ir.graph import IR
from fxsplit.passes import PASSES
from fxsplit.schedule import RUNNABLE
from fxsplit.schedule.generators.catalogue import Scheduler
from tests.support.models import FAST


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(8)))


def compiled(**options: Any) -> fxsplit.Pipeline:
    given = {"loss_fn": F.mse_loss, "passes": FAST, "example_inputs": torch.randn(32, 32), **options}
    return fxsplit.compile(model(), ["cpu"] * 2, **given)


def test_what_is_tried() -> None:
    assert list_microbatch_counts(100, 2) == [2, 4, 8, 16]
    assert list_microbatch_counts(9, 4) == [4, 8]
    assert list_microbatch_counts(3, 4) == [3]
    assert [s.name for s in list_schedulers("auto", 2, None)] == list(RUNNABLE)
    assert [s.name for s in list_schedulers("auto", 2, 3)] == ["LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"]
    assert [s.name for s in list_schedulers("auto", 2, 1)] == [
        "GPipe",
        "1F1B",
        "LoopedBFS",
        "Interleaved1F1B",
        "ZB-H1",
        "ZB-H2",
        "InterleavedZeroBubble",
        "Chimera",
    ]
    assert list_schedulers("GPipe", 2, None) == [Scheduler("GPipe", 2)]
    assert str(Candidate(Scheduler("GPipe", 2), 4)) == "GPipe with 4 microbatches"


def test_the_fastest_schedule_is_taken() -> None:
    """No stated schedule, planned from the same costs, is predicted to be faster."""
    with compiled(n_microbatches=4) as first:
        costs = first.costs
    with compiled(schedule="auto", n_microbatches=4, costs=costs) as pipe:
        chosen = Candidate(Scheduler(pipe.plan.schedule, 2), 4).predict_step_ms(pipe.plan)
        x = torch.randn(32, 32)
        pipe.step(x, target=x)
        pipe.eval()
        assert pipe(x).shape == x.shape
    for name in RUNNABLE:
        with compiled(schedule=name, n_microbatches=4, costs=costs) as other:
            assert chosen <= Candidate(Scheduler(name, 2), 4).predict_step_ms(other.plan) * (1 + 1e-9)


def test_numbers_of_microbatches_are_measured_and_kept() -> None:
    with compiled(n_microbatches="auto", schedule="1F1B") as pipe:
        count = pipe.plan.n_microbatches
        assert count in (2, 4, 8, 16) and pipe.plan.rows == 32 // count and pipe.plan.schedule == "1F1B"
        for rows in (32, 33, 5, 2):  # without "auto", smaller batches are cut as always
            x = torch.randn(rows, 32)
            loss = pipe.step(x, target=x)
            assert torch.isfinite(loss)


def test_microbatches_that_the_model_does_not_run_on_are_left_out() -> None:
    """Batch norm does not train on a single row: a search among 2, 4 and 8 rows must stop before it, and not fail."""
    norm = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32))
    x = torch.randn(8, 32)
    with fxsplit.compile(
        norm, ["cpu"] * 2, example_inputs=x, n_microbatches="auto", loss_fn=F.mse_loss, passes=FAST
    ) as pipe:
        assert torch.isfinite(pipe.step(x, target=x))
    for rows in (2, 1):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            fxsplit.compile(norm, ["cpu"] * 2, example_inputs=x[:rows], n_microbatches="auto", passes=FAST)


def test_only_the_candidate_that_is_taken_warns() -> None:
    """Schedules with two stages a device leave some stages of a small model empty, and are tried for each number."""
    small, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(16, 8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pipe = fxsplit.compile(
            small,
            ["cpu"] * 2,
            schedule="auto",
            n_microbatches="auto",
            loss_fn=F.mse_loss,
            example_inputs=x,
            passes=FAST,
        )
    idle = [w for w in said if "only pass values on" in str(w.message)]
    assert len(idle) == any(not stage.nodes for stage in pipe.plan.stages)


def test_memory_rules_schedules_out() -> None:
    """GPipe holds every microbatch's activations. If they do not fit, "auto" takes another, or the error says so."""
    with compiled(schedule="GPipe", n_microbatches=16) as pipe:
        costs, most = pipe.costs, max(s.memory_bytes for s in pipe.plan.stages)
    with compiled(schedule="1F1B", n_microbatches=16, costs=costs) as pipe:
        least = max(s.memory_bytes for s in pipe.plan.stages)
    assert least < most
    tight = fxsplit.Machine.of(["cpu"] * 2, memory_bytes=least)
    x = torch.randn(32, 32)
    options: Any = {"loss_fn": F.mse_loss, "passes": FAST, "example_inputs": x, "n_microbatches": 16, "costs": costs}
    with fxsplit.compile(model(), tight, schedule="auto", **options) as pipe:
        assert pipe.plan.schedule not in ("GPipe", "LoopedBFS")
    tiny = fxsplit.Machine.of(["cpu"] * 2, memory_bytes=1000)
    with pytest.raises(fxsplit.FxsplitError, match=r"none of GPipe with 16 .* fits; nearest is (1F1B|Int|ZB|Chi)"):
        fxsplit.compile(model(), tiny, schedule="auto", **options)


def test_bad_input() -> None:
    with compiled() as pipe, pytest.raises(fxsplit.FxsplitError, match="measures microbatches of every size"):
        compiled(n_microbatches="auto", costs=pipe.costs)
    with pytest.raises(fxsplit.FxsplitError, match="n_microbatches='many'"):
        compiled(n_microbatches="many")


def test_each_number_of_microbatches_is_captured_and_measured_once() -> None:
    """Candidates with one number share costs; the choice comes with the costs of its own microbatch size."""
    options = CompileOptions(
        machine=fxsplit.Machine.of(["cpu"] * 2), chain=parse_chain(FAST, PASSES), n_microbatches="auto"
    )
    network, call, captured = model(), Call((torch.randn(16, 32),), {}), []

    def capture_rows(rows: Sequence[int]) -> IR:
        captured.append(rows[0])
        return capture_model(network, options, call, rows, from_shapes=False)

    chosen, costs, counts = choose_candidate(replace(options, schedule="auto"), 16, capture_rows)
    assert captured == [8, 4, 2, 1]
    assert costs is not None and costs.rows == 16 // chosen.n_microbatches and counts == ()
    captured.clear()
    only = choose_candidate(replace(options, n_microbatches=4), 16, capture_rows)
    assert only == (Candidate(Scheduler("1F1B", 2), 4), None, ()) and captured == []


def test_candidates_are_dumped_beside_the_plan_that_runs(tmp_path: Path) -> None:
    """A second compile replaces them, and chain.json says how they compare."""
    tight = fxsplit.Machine.of(["cpu"] * 2, memory_bytes=95_000)
    for options in ({"schedule": "auto", "n_microbatches": 16}, {"schedule": "1F1B", "n_microbatches": "auto"}):
        given: Any = {"passes": FAST, "example_inputs": torch.randn(32, 32), **options}
        with fxsplit.compile(model(), tight, dump=tmp_path, **given) as pipe:
            found = json.loads((tmp_path / "candidates" / "chain.json").read_text())
            folders = {path.name for path in (tmp_path / "candidates").iterdir() if path.is_dir()}
            assert folders == {*found["step_ms"], *found["refused"]} and [*tmp_path.glob("0?-emit.ir")]
            # Its own costs were measured again, or another candidate took the same time.
            fastest = min(found["step_ms"], key=found["step_ms"].__getitem__)
            assert fastest.startswith(pipe.plan.schedule)
            for name in found["step_ms"]:
                assert (tmp_path / "candidates" / name / "04-partition.ir").exists()
            for name, why in found["refused"].items():
                mark = json.loads((tmp_path / "candidates" / name / "chain.json").read_text())
                assert mark["failed"] == f"in partition: NoFit: {why}" and "bytes" in why
        assert bool(found["refused"]) == (options["schedule"] == "auto")
