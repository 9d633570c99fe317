"""Two hosts on one machine: the simulation, and, if namespaces are allowed, a training over their link."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from bench.hosts import find_obstacle, main, simulate_over
from fxsplit.ir.facts.price import StagePlan
from fxsplit.schedule import generate


def stage(**figures: Any) -> StagePlan:
    named = dict.fromkeys(
        ("receive_ms", "send_ms", "reduce_ms", "load_ms", "in_bytes", "out_bytes", "memory_bytes"), 0.0
    )
    return StagePlan(("a",), (0,), **{"forward_ms": 5.0, "backward_ms": 10.0, **named, **figures})


def test_links_of_the_simulation_have_the_rate_that_is_set() -> None:
    """100 Mbit/s are 12,500 bytes in a millisecond: 55 ms each way."""
    stages = [stage(), stage(in_sent_bytes=687_500.0, in_sent_gradient_bytes=687_500.0)]
    found = simulate_over(stages, generate("1F1B", 2, 8), 100.0)
    assert found.step_ms == 615.0
    assert simulate_over(stages, generate("1F1B", 2, 8), 1e9).step_ms == pytest.approx(135.0, abs=1e-3)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda command: None)
    assert main(["--mbit", "100"]) == 0
    assert "two hosts need network namespaces: there is no command 'ip'" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("how", [[], ["--compress", "int8"]])
def test_a_pipeline_trains_over_the_link(how: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    why = find_obstacle()
    if why:
        pytest.skip(f"network namespaces are not allowed here: {why}")
    assert main(["--mbit", "400", "--steps", "2", *how]) == 0
    _, _, row = capsys.readouterr().out.splitlines()
    rate, crosses, busy, *figures = [cell.strip() for cell in row.strip("|").split("|")]
    assert rate == "400" and busy.endswith(" %") and all(float(figure) > 0 for figure in figures)
    # 4 rows of 3,200 words of 64 elements in 8 microbatches; as int8, a byte for each and a scale for each word.
    assert crosses == ("26.21 MB" if not how else "6.96 MB")
