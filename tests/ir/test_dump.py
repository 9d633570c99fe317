"""What people look at: dumps, printed IR, plans, stage code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fxsplit
from fxsplit.errors import ChainError
from tests.models import FAST, Mlp, ModeDependent, Residual

FILES = ["00-trace.txt", "01-profile.txt", "02-augment.txt", "03-order.txt", "04-partition.txt", "05-emit.txt"]
FILES.append("06-batch-norm.txt")


def dumped(folder: Path, **options: object) -> fxsplit.Pipeline:
    torch.manual_seed(0)
    pipe = fxsplit.compile(Residual(), 2, example_inputs=torch.randn(8, 3, 8, 8), passes=FAST, **options)  # type: ignore[arg-type]
    pipe.close()
    return pipe


def test_dump_writes_the_ir_before_the_first_and_after_every_pass(tmp_path: Path) -> None:
    dumped(tmp_path, dump=tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == FILES
    trace = (tmp_path / "a" / FILES[0]).read_text()
    assert "%stem_0 = module stem.0(%x) : float32[4, 8, 8, 8]" in trace
    assert "[Costs]" not in trace and "[Machine]\ncpu:0: cpu" in trace
    for name, section in zip(FILES[1:], ("Costs", "Antichains", "States", "Plan", "Stages", "Stages"), strict=True):
        assert f"\n[{section}]\n" in (tmp_path / "a" / name).read_text()


def test_dump_is_deterministic_but_for_measured_figures(tmp_path: Path) -> None:
    """Planned from the same profile, two runs write the same bytes."""
    costs = dumped(tmp_path).costs
    for run in ("a", "b"):
        dumped(tmp_path, dump=tmp_path / run, costs=costs)
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_other_mode_dumps_beside(tmp_path: Path) -> None:
    with fxsplit.compile(ModeDependent(), 2, passes=FAST, dump=tmp_path) as pipe:
        pipe(torch.randn(8, 8))
        pipe.eval()(torch.randn(8, 8))
    assert (tmp_path / "05-emit.txt").exists() and (tmp_path / "eval" / "05-emit.txt").exists()


def test_environment_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FXSPLIT_DUMP", str(tmp_path / "env"))
    monkeypatch.setenv("FXSPLIT_PRINT_AFTER", "partition,trace")
    dumped(tmp_path)
    assert sorted(p.name for p in (tmp_path / "env").iterdir()) == FILES
    printed = capsys.readouterr().out
    assert re.findall(r"^# after (\S+)", printed, re.MULTILINE) == ["trace", "partition"]
    monkeypatch.setenv("FXSPLIT_PRINT_AFTER", "all")
    dumped(tmp_path)
    assert len(re.findall(r"^# after", capsys.readouterr().out, re.MULTILINE)) == 7
    monkeypatch.setenv("FXSPLIT_PRINT_AFTER", "partitoin")
    with pytest.raises(ChainError, match="FXSPLIT_PRINT_AFTER names 'partitoin': known are all, trace, profile"):
        dumped(tmp_path)


def test_a_plan_prints_what_a_reader_needs(tmp_path: Path) -> None:
    text = str(dumped(tmp_path).plan)
    for word in ("nodes", "fwd ms", "bwd ms", "in", "out", "memory", "bottleneck", "lower bound", "optimal"):
        assert word in text
    capped = fxsplit.compile(
        Residual(), 2, example_inputs=torch.randn(8, 3, 8, 8), passes=FAST.replace("augment", "augment{max_states=3}")
    )
    assert "gap" in str(capped.plan) or capped.plan.optimal


def test_stage_code_is_readable(tmp_path: Path) -> None:
    first, second = dumped(tmp_path).stages.stages
    assert "self.stem" in first.code and first.code.count("return (") == 1
    assert first.outputs == second.inputs and all(name in first.code for name in first.outputs)


def test_the_rewritten_graph_is_the_model(tmp_path: Path) -> None:
    model = Residual().eval()
    x = torch.randn(8, 3, 8, 8)
    with fxsplit.compile(model, 3, example_inputs=x, passes=FAST) as pipe:
        torch.testing.assert_close(pipe.ir.gm(x), model(x))
        assert [n.op for n in pipe.ir.gm.graph.nodes].count("call_module") == 3


def test_steps_and_repr() -> None:
    with fxsplit.compile(Mlp(), 2, example_inputs=torch.randn(8, 8), passes=FAST) as pipe:
        assert [s.text for s in pipe.ir.steps] == [*FAST.split(","), "batch-norm"]
        assert repr(pipe).startswith("Pipeline(Mlp)\nstage ")
