"""The table and the plot of growing compiles are made, on models that take no time."""

from __future__ import annotations

import json
from math import log
from pathlib import Path

import pytest

from bench import growth
from bench.growth import COSTS, KINDS, Point, fit_exponent, list_lines, main


@pytest.mark.long
def test_a_row_for_each_kind_of_model_and_of_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(growth, "NODES", (20, 40))
    own = {kind: make for kind, make in KINDS.items() if "Llama" not in kind}
    monkeypatch.setattr(growth, "KINDS", own)
    plot, points = tmp_path / "growth.svg", tmp_path / "points.json"
    main(["--plot", str(plot), "--points", str(points)])
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [tuple(row.split(" | ")[:2]) for row in rows] == [(f"| {kind}", costs) for kind in own for costs in COSTS]
    assert all(f"{kind}, costs {costs}" in plot.read_text() for kind in own for costs in COSTS)
    # The second model of each kind has more nodes, and lines with known costs have as many nodes as lines without.
    kept = [Point(*each) for each in json.loads(points.read_text())]
    nodes = [[p.nodes for p in line] for _, _, line in list_lines(kept)]
    assert all(few < many for few, many in nodes) and nodes[::2] == nodes[1::2]


def test_points_of_earlier_runs_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Kinds may be measured one at a time, whenever the machine is quiet."""
    path = tmp_path / "points.json"
    first, second, *_ = KINDS
    path.write_text(json.dumps([Point(second, "known", n, float(n)) for n in (10, 1000)]))
    monkeypatch.setattr(growth, "measure", lambda kind, n: [Point(kind, costs, n, n**2.0) for costs in COSTS])
    main(["--match", first, "--points", str(path)])
    exponents = [row.split(" | ")[-1].rstrip(" |") for row in capsys.readouterr().out.splitlines()[2:]]
    assert exponents == ["2.00", "2.00", "1.00"]


def test_the_exponent_is_the_slope_of_the_logarithms() -> None:
    points = [Point("any", "known", n, 0.5 * n**1.2) for n in (200, 600, 5000)]
    assert abs(fit_exponent(points) - 1.2) < 1e-9
    noisy = [points[0], points[1]._replace(seconds=points[1].seconds * 1.1), points[2]]
    assert abs(fit_exponent(noisy) - 1.2) < log(1.1)
