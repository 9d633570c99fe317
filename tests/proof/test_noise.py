"""A profile records how much its repeats vary, and a plan from an unsteady profile warns with that figure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fxsplit
from fxsplit import Costs
from fxsplit.cli.main import main
from fxsplit.errors import UnsteadyProfileWarning
from fxsplit.formats.plan_json import read_plan, save_plan
from fxsplit.ir.facts.costs.costs import InputCost
from tests.support.graphs import node
from tests.support.models import Mlp

SAID = r"measured times vary by ±25 % from repeat to repeat"


def make_costs(spread_ms: float | None, ms: float = 3.0) -> Costs:
    """Return a chain of nodes that take 3 x `ms` each, and vary by `spread_ms`."""
    nodes = (replace(node(f"n{i}", [f"n{i - 1}" if i else "x"], ms), spread_ms=spread_ms) for i in range(3))
    return Costs(tuple(nodes), (InputCost("x", 0.0, 0.0),), ("n2",), rows=1)


def test_a_profile_keeps_the_spread(tmp_path: Path) -> None:
    costs = fxsplit.profile(Mlp(), torch.randn(32, 8), repeats=3)
    assert costs.spread is not None and costs.spread >= 0.0
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json").spread == costs.spread
    assert fxsplit.profile(Mlp(), torch.randn(32, 8), repeats=1).spread is None


def test_files_of_earlier_versions_have_none(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    make_costs(None).save(path)
    path.write_text(path.read_text().replace(', "spread_ms": null', ""))
    costs = Costs.load(path)
    assert costs.spread is None and costs.noise is None and "±" not in str(fxsplit.plan(costs, 2))


def test_plan_says_it_and_carries_the_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile measured while another program ran used to give an 'optimal' plan of wrong times, without a warning."""
    with pytest.warns(UnsteadyProfileWarning, match=SAID) as caught:
        plan = fxsplit.plan(make_costs(2.25), 2)
    assert caught[0].filename == __file__ and plan.spread == 0.25
    assert f"bottleneck {plan.bottleneck_ms:.3f} ms ± 25 %" in str(plan)
    save_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").spread == 0.25
    make_costs(2.25).save(tmp_path / "costs.json")
    assert main(["plan", str(tmp_path / "costs.json")]) == 0
    told = capsys.readouterr()
    assert "± 25 %" in told.out and "note: the measured times vary by ±25 %" in told.err


@pytest.mark.parametrize(("spread_ms", "ms"), [(0.4, 3.0), (0.0225, 0.03)])
def test_steady_profiles_and_tiny_models_are_left_alone(
    spread_ms: float, ms: float, recwarn: pytest.WarningsRecorder
) -> None:
    fxsplit.plan(make_costs(spread_ms, ms), 2)
    assert not recwarn.list


def test_compile_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxsplit.ir.facts.costs.costs.LEAST_MS", 0.0)
    monkeypatch.setattr("fxsplit.ir.facts.costs.costs.UNSTEADY", 0.0)
    options: dict[str, Any] = {"example_inputs": torch.randn(16, 8), "n_microbatches": 2, "loss_fn": F.mse_loss}
    with pytest.warns(UnsteadyProfileWarning, match="measured times vary by") as caught:
        pipe = fxsplit.compile(Mlp(), 2, **options)
    assert caught[0].filename == __file__
    with pipe:
        assert pipe.plan.spread is not None and "ms ±" in str(pipe.plan)
