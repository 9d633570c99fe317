"""`make bench-compare`: a ratio that is a fifth worse than the stored one fails, and times alone never do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import compare

WORK = "transformer, 16 rows, 8 microbatches"


def save_run(path: Path, ours: float, cpu: float, work: str = WORK) -> str:
    """Write a run in which a step of the pipeline takes 1 / ours of the model's, and so does the loop."""
    seconds = {"fxsplit": 1.0 / ours, "loop, 1 thread": 1.0, "whole, 1 thread": 1.0, "traced": 1.0}
    info: dict[str, Any] = {"runtime": work, "seconds": seconds, "of_bound": 0.993, "cpu": cpu}
    path.write_text(json.dumps({"benchmarks": [{"extra_info": info, "stats": {"median": 1.0}}]}))
    return str(path)


def test_the_tables_of_the_page_have_ratios() -> None:
    stored = compare.read_ratios(compare.STORED.read_text(encoding="utf-8"))
    assert {column for _, column in stored} == set(compare.RATIOS)
    assert stored[WORK, "fxsplit"] > 1.0 and stored[WORK, "share of the bound"] > 50.0


@pytest.mark.parametrize(
    ("ours", "cpu", "code", "said"),
    [
        (1.0, 1.0, 0, "none of 3 ratios is worse"),
        (0.81, 1.0, 0, "none of 3 ratios is worse"),
        (0.79, 1.0, 1, f"{WORK}: fxsplit was"),
        (1.0, 1.2, 0, "none of 3 ratios is worse"),
        (1.0, 1.3, 1, f"{WORK}: CPU time of the loop's was"),
        (2.0, 0.5, 0, "none of 3 ratios is worse"),
    ],
)
def test_a_ratio_that_is_a_fifth_worse_fails(
    ours: float, cpu: float, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = compare.read_ratios(compare.STORED.read_text(encoding="utf-8"))
    ours *= stored[WORK, "fxsplit"]
    cpu *= stored[WORK, "CPU time of the loop's"]
    assert compare.main(save_run(tmp_path / "run.json", ours, cpu)) == code
    assert said in capsys.readouterr().out


def test_a_run_of_other_work_is_compared_with_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(save_run(tmp_path / "run.json", 1.0, 1.0, "another network")) == 1
    assert "has no ratio that README.md has" in capsys.readouterr().out
