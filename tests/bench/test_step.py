"""The table of plans for the shortest step, and the count of small graphs, hold what they say."""

from __future__ import annotations

from pathlib import Path

from bench.step import count_small, draw, measure, summarise, tabulate
from tests.formats.test_formats import PIPEDREAM


def test_a_row_compares_the_plan_with_those_for_the_smallest_bottleneck(tmp_path: Path) -> None:
    (tmp_path / "net.txt").write_text(PIPEDREAM)
    row = measure(tmp_path / "net.txt", 2, 1e9, 4, "replicated")
    assert row.plan is not None and row.plan.step_ms is not None
    assert row.plan.step_ms <= row.best_usual <= min(row.usual)
    assert "1 cases: gap" in next(iter(summarise([row])))
    text = list(tabulate(tmp_path, 4, "forwarded"))
    assert len(text) == 2 + 6 + 1 + 4 and text[2].startswith("| net 4 @1 |")


def test_rows_without_a_plan_are_counted(tmp_path: Path) -> None:
    (tmp_path / "net.txt").write_text(PIPEDREAM)
    text = list(tabulate(tmp_path, 4, "replicated", memory=0.01))
    assert "does not fit" in text[2]
    assert text[-1] == "no plan in 6 of 6 cases, and one of the smallest bottleneck in 0 of them"
    text = list(tabulate(tmp_path, 4, "replicated", memory=1.0))
    assert "6 cases: gap" in text[-4] and text[-1].endswith("slower in 0")


def test_small_graphs_are_counted() -> None:
    lines = list(count_small(3, 0, 1_000))
    assert lines[0].endswith("bound above the optimum in 0, step below it in 0")
    assert draw(7)[1:] == draw(7)[1:]


def test_a_profile_that_cannot_be_planned_says_why(tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("no profile\n")
    rows = list(tabulate(tmp_path, 4, "forwarded"))
    assert rows[2].startswith("| none 4 @1 | ") and "no profile" in rows[2]
    assert list(summarise([])) == []
