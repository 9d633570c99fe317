"""The house keeps its layers: every room imports only from lower rows, and nothing imports in a circle."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent

# Rooms by row, lowest first; a room is a module or a whole package.
ROWS: list[set[str]] = [
    {"errors", "progress", "structures", "patching"},
    {"ir", "kernels"},
    {
        *("machine", "chunks", "inputs", "draws", "leaves", "observe", "dependences", "costs", "context", "measure"),
        *("standins", "alone", "gradients", "joins"),
        *("blocks", "antichains", "states", "workload", "plans", "stages", "placement"),
    },
    {"planner", "formats"},
    {"trace", "text", "spec", "manager", "observers", "schedule", "runtime"},
    {"passes"},
    {"planning", "profiling", "report", "choice"},
    {"driver"},
    {"comparison", "zoo"},
    {"verification"},
    {"demo"},
    {"commands"},
    {"cli", ""},
    {"__main__"},
]
MAY_USE_ITS_ROW = {
    # Facts build on facts, and the runtime executes schedules; test_no_import_cycle keeps both in order.
    **dict.fromkeys(ROWS[2], ROWS[2]),
    **{room: {"errors", "progress", "structures"} for room in ROWS[0]},
    "runtime": {"schedule"},
    "planning": {"profiling"},  # a model is measured first
    "manager": {"spec"},
    "observers": {"text"},
}
FORBIDDEN = {
    # Facts hold arrays and never compute on them; passes know nothing of movement or of each other.
    **{room: {"kernels"} for room in ROWS[2]},
    "passes": {"trace", "manager", "observers", "runtime", "schedule", "spec", "text"},
}


def sources() -> dict[str, Path]:
    """Every module of fxsplit by its dotted name below the package; passes/ lies outside it."""
    found = {}
    for folder, prefix in ((ROOT / "fxsplit", ""), (ROOT / "passes", "passes")):
        for path in sorted(folder.rglob("*.py")):
            if folder.name == "fxsplit" and path.relative_to(folder).parts[0] == "passes":
                continue
            parts = [*prefix.split("."), *path.relative_to(folder).with_suffix("").parts]
            found[".".join(p for p in parts if p and p != "__init__")] = path
    return found


def imports(path: Path, lazily: bool = False) -> set[str]:
    """The fxsplit modules a file imports; only at its top level unless `lazily`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree) if lazily else tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fxsplit":
            base = (node.module or "").removeprefix("fxsplit").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                found.add(inner if inner in sources() else base)
        elif isinstance(node, ast.Import):
            found |= {
                a.name.removeprefix("fxsplit").removeprefix(".") for a in node.names if a.name.startswith("fxsplit")
            }
    return found


def row_of(room: str) -> int:
    return next(i for i, rooms in enumerate(ROWS) if room in rooms)


def test_every_room_has_a_row() -> None:
    assert {name.split(".")[0] for name in sources()} == set().union(*ROWS)


@pytest.mark.parametrize("name", list(sources()))
def test_imports_go_down(name: str) -> None:
    room = name.split(".")[0]
    for other in imports(sources()[name], lazily=True):
        target = other.split(".")[0]
        if target == room:
            assert room != "passes" or name == "passes", f"{name} imports {other}: passes never import each other"
            continue
        assert target not in FORBIDDEN.get(room, set()), f"{name} imports {other}"
        allowed = row_of(target) < row_of(room) or target in MAY_USE_ITS_ROW.get(room, set())
        assert allowed, f"{name} (row {row_of(room)}) imports {other} (row {row_of(target)})"


def test_no_import_cycle() -> None:
    graph = nx.DiGraph((name, other) for name, path in sources().items() for other in imports(path, lazily=True))
    graph.remove_edges_from([(a, b) for a, b in graph.edges if b == ""])
    assert list(nx.simple_cycles(graph)) == []


def test_only_kernels_import_numba_and_only_when_used() -> None:
    for name, path in sources().items():
        text = path.read_text(encoding="utf-8")
        assert "numba" not in text.replace("numba is imported", "") or name.startswith("kernels"), name
    import subprocess
    import sys

    code = "import sys, fxsplit; assert 'numba' not in sys.modules, 'numba is loaded by import fxsplit'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_are_short() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in sources().items()}
    assert max(lengths.values()) <= 400, lengths


def test_passes_is_a_link() -> None:
    link = ROOT / "fxsplit" / "passes"
    assert link.is_symlink() and os.readlink(link) == "../passes"
