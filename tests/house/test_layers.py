"""The house keeps its rooms and layers: every room imports only from lower rows, and nothing imports in a circle."""

from __future__ import annotations

import os
import subprocess
import sys

import networkx as nx
import pytest

from tests.house.sources import ROOT, imported, imports, modules, room

# Rooms by row, lowest first. No room imports another one of its own row.
ROWS: list[set[str]] = [
    {"errors"},
    {"torch_internals"},
    {"ir"},
    {"schedule", "formats", "frontend"},
    {"planner"},
    {"passes", "runtime", "report"},
    {"api"},
    {"cli"},
    {"", "__main__"},
]
ROW = {name: i for i, names in enumerate(ROWS) for name in names}
# What a room may import, where that is less than all lower rows.
MAY_IMPORT = {
    "schedule": {"errors", "ir"},
    "formats": {"errors", "ir", "torch_internals"},
    "planner": {"errors", "ir", "schedule"},
    "passes": {"errors", "torch_internals", "ir", "schedule", "formats", "planner"},
    "runtime": {"errors", "torch_internals", "ir", "schedule"},
    "report": {"errors", "ir", "schedule"},
}
LOOSE = {"", "__main__", "errors"}  # the only files at the top of fxsplit/


def test_every_room_has_a_row_and_no_file_is_loose() -> None:
    assert {room(name) for name in modules()} == set(ROW)
    assert {path.stem.replace("__init__", "") for path in (ROOT / "fxsplit").glob("*.py")} == LOOSE


@pytest.mark.parametrize("name", list(modules()))
def test_imports_go_down(name: str) -> None:
    own = room(name)
    for other in imports(name):
        target = room(other)
        if target == own:
            continue
        assert ROW[target] < ROW[own], f"{name} (row {ROW[own]}) imports {other} (row {ROW[target]})"
        assert target in MAY_IMPORT.get(own, ROW), f"{name} imports {other}: {own} may not use {target}"


@pytest.mark.parametrize("name", [n for n in modules() if room(n) == "passes" and n != "passes"])
def test_no_pass_imports_a_pass(name: str) -> None:
    own = name.split(".")[1]
    others = {other for other in imports(name) if room(other) == "passes"}
    assert all(other.split(".")[1:2] == [own] for other in others), f"{name} imports {others}"


def test_nothing_imports_what_is_beside_the_package() -> None:
    """The wheel has no tests, no bench, and no package called passes."""
    beside = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"fxsplit"}
    assert {"bench", "passes", "tests"} <= beside
    found = [(name, full) for name in modules() for _, full in imported(name) if full.split(".")[0] in beside]
    assert found == []


def test_no_import_cycle() -> None:
    graph = nx.DiGraph((name, other) for name in modules() for other in imports(name))
    graph.remove_edges_from([(a, b) for a, b in graph.edges if b == ""])
    assert list(nx.simple_cycles(graph)) == []


@pytest.mark.parametrize(
    ("code", "unloaded"),
    [
        ("import fxsplit", {"torch", "numba", "numpy"}),
        ("import fxsplit.planner, fxsplit.schedule, fxsplit.formats.read, fxsplit.report", {"torch", "numba"}),
        ("import fxsplit.api.plan, fxsplit.cli.main, fxsplit.cli.plan, fxsplit.cli.simulate", {"torch", "numba"}),
    ],
)
def test_planning_loads_neither_torch_nor_numba(code: str, unloaded: set[str]) -> None:
    script = f"import sys; {code}; print(*({unloaded!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_passes_is_a_link() -> None:
    link = ROOT / "fxsplit" / "passes"
    assert link.is_symlink() and os.readlink(link) == "../passes"
