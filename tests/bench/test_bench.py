"""Every benchmark runs, at its smallest size, and `make bench` makes tables of the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.lib import report
from bench.networks import TABLE_1
from tests.formats.profiles.test_dnn_partitioning import edge, node
from tests.house.sources import ROOT

DNN_PARTITIONING = {
    "maxSizePerFPGA": 1000.0,
    "maxFPGAs": 2,
    "maxCPUs": 0,
    "nodes": [node(i) for i in range(3)],
    "edges": [edge(i, i + 1) for i in range(2)],
}
PIPEDREAM = "".join(
    f"node{i} -- Linear() -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=8.0, "
    "parameter_size=4.0\n"
    for i in range(1, 9)
) + "".join(f"\tnode{i} -- node{i + 1}\n" for i in range(1, 8))

SENTENCES = {"overhead_us": "us an action more", "hearing_us": "to hear of Ctrl-C"}
"""Results that the report states in a sentence, by the benchmark's key."""
TITLES = ("work", "network", "runtime", "copies", "prediction", "shapes", "inference")
"""The keys of the tables' first columns."""


def run_smallest(path: Path, folder: Path) -> list[Any]:
    """Run a file's benchmarks, which must pass, and return the results that pytest-benchmark writes."""
    for name, text in (("dnn_partitioning/a.json", json.dumps(DNN_PARTITIONING)), ("pipedream/a.txt", PIPEDREAM)):
        (folder / name).parent.mkdir()
        (folder / name).write_text(text)
    # pytest-benchmark measures nothing in an xdist worker, and mistakes a worker's child for a worker.
    own = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    env = {**own, "FXSPLIT_BENCH": "smallest", "FXSPLIT_PROFILES": str(folder), "PYTHONPATH": str(ROOT)}
    options = ["-q", "-p", "no:cacheprovider", "--benchmark-only", f"--benchmark-json={folder / 'found.json'}"]
    command = [sys.executable, "-m", "pytest", str(path), *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-5000:] + done.stderr[-2000:]
    found: list[Any] = json.loads((folder / "found.json").read_text())["benchmarks"]
    return found


@pytest.mark.long
@pytest.mark.parametrize("path", sorted((ROOT / "bench").glob("bench_*.py")), ids=lambda path: str(path.stem))
def test_every_benchmark_runs_and_its_table_is_made(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_smallest(path, tmp_path)
    report.main(str(tmp_path / "found.json"))
    lines = capsys.readouterr().out.splitlines()
    # Each row names its work in the first column, or in a sentence of its own.
    for row in found:
        info = row["extra_info"]
        if said := [text for key, text in SENTENCES.items() if key in info]:
            assert any(said[0] in line for line in lines), f"{row['name']} notes {info}, and no line shows it"
            continue
        (key,) = [key for key in TITLES if key in info]
        title = TABLE_1.get(info[key], info[key])
        assert any(title in line for line in lines), f"{row['name']} notes {info}, and no table shows it"
