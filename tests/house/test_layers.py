"""Rooms and layers hold: imports go to lower rows, inside of rooms too, and never in a circle."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import networkx as nx

from tests.house.sources import ROOT, imported, imports, modules, room

# Rooms by row, lowest first. No room imports a room of its own row.
ROWS: list[set[str]] = [
    {"errors"},
    {"system"},
    {"torch_internals"},
    {"allocation", "ir"},
    {"schedule", "formats", "frontend"},
    {"planner"},
    {"passes", "runtime", "report"},
    {"api"},
    {"cli"},
    {"", "__main__"},
]
ROW = {name: i for i, names in enumerate(ROWS) for name in names}
# The only rooms that a room may import, if they are fewer than all lower rows.
MAY_IMPORT = {
    "allocation": {"errors", "system"},
    "schedule": {"errors", "system", "ir"},
    "formats": {"errors", "system", "allocation", "ir", "torch_internals"},
    "planner": {"errors", "system", "ir", "schedule"},
    "passes": {"errors", "system", "torch_internals", "ir", "schedule", "formats", "planner"},
    "runtime": {"errors", "system", "torch_internals", "ir", "schedule"},
    "report": {"errors", "system", "allocation", "ir", "schedule"},
}
LOOSE = {"", "__main__", "errors"}  # the only files at the top of fxsplit/
# Inside of a room: its folders and files by row, lowest first. None imports a neighbour of its own row.
INNER: dict[str, list[set[str]]] = {
    "torch_internals": [
        {"needs", "scopes", "torchvision_operators", "user_lines", "error_texts"},
        {"autograd", "torch_compile"},
        {"random"},
        {"thread_modes"},
        {"distributed", "tensors"},
        {"fake"},
        {"fx"},
        {"nn", "probes", "torch_pipelining", "tracing"},
        {"contents"},
    ],
    "allocation": [{"job"}, {"allocate"}, {"policies"}, {"replay"}],
    "ir.text": [{"tokens"}, {"values"}, {"graph", "records"}, {"fx_graph"}, {"write"}, {"read"}],
    "ir.facts": [
        {"compared", "costs"},
        {"memory"},
        {"given"},
        {"capture", "lattice", "price", "split", "stages"},
        {"plan"},
    ],
    "schedule": [
        {"action"},
        {"schedule"},
        {"flow", "homes"},
        {"outstanding", "verify"},
        {"moments", "torch_csv"},
        {"simulation"},
        {"kernels"},
        {"generators"},
        {"of_plan", "solver"},
        {"schedule_plan", "taxonomy"},
        {"choose_schedule"},
    ],
    "formats": [
        {"device_kinds"},
        {"plan_json", "profiles", "toml_tables", "weights"},
        {"jobs_toml", "machine_toml", "read"},
    ],
    "frontend": [
        {"layer_drop", "restore", "stop_point"},
        {"subject"},
        {"graph"},
        {"check", "front_ends", "watch"},
        {"follow", "meanings"},
        {"choose_graph"},
        {"capture"},
        {"other_shapes"},
    ],
    "report": [
        {"devices", "drawing", "graph", "perfetto", "terminal"},
        {"export", "pictures"},
        {"page", "picture"},
    ],
    "report.page": [{"story"}, {"script_data", "words"}, {"tables"}, {"sections"}, {"page"}],
    "report.pictures": [{"bars", "graph", "places", "timeline"}, {"curves", "plan", "utilisation"}],
    "planner": [
        {"clock", "kernels"},
        {"lattice"},
        {"problem"},
        {"search"},
        {"baselines", "direct", "no_plan"},
        {"solve"},
        {"step"},
        {"batch", "planner"},
    ],
    "passes.profile": [
        {"clock", "thread"},
        {"weigh"},
        {"time_in_step", "weigh_loss"},
        {"time_alone"},
        {"estimate"},
        {"profile"},
    ],
    "planner.step": [
        {"kernels"},
        {"bound", "prices"},
        {"search", "two_stages"},
        {"chain_search", "plans"},
        {"usual"},
        {"step"},
    ],
    "runtime": [
        {"stage"},
        {"autograd_node", "program"},
        {"microbatches", "weight_snapshot"},
        {"loss"},
        {"job"},
        {"backends"},
        {"engine", "ranks"},
    ],
    "runtime.ranks": [
        {"failures", "hooks"},
        {"world"},
        {"gradients", "weight_placement", "wire"},
        {"shared_weights"},
        {"session"},
        {"backend"},
    ],
    "api": [
        {"companions", "compiler"},
        {"generation", "profile", "report", "to_titan", "to_torch"},
        {"pipeline"},
        {"checkpoint", "compile", "plan"},
        {"allocate", "toolkit", "verify"},
    ],
}
MAX_LOOSE = 13  # files in a folder at most, so that its names are read at a glance


def test_every_room_has_a_row_and_no_file_is_loose() -> None:
    assert {room(name) for name in modules()} == set(ROW)
    assert {path.stem.replace("__init__", "") for path in (ROOT / "fxsplit").glob("*.py")} == LOOSE


def list_breaches(name: str) -> list[str]:
    """Return the forbidden imports of a module from other rooms."""
    own, found = room(name), []
    for other in sorted(imports(name)):
        target = room(other)
        if target != own and ROW[target] >= ROW[own]:
            found.append(f"{name} (row {ROW[own]}) imports {other} (row {ROW[target]})")
        if target != own and target not in MAY_IMPORT.get(own, ROW):
            found.append(f"{name} imports {other}: {own} may not use {target}")
    return found


def test_imports_go_down() -> None:
    breaches = [breach for name in modules() for breach in list_breaches(name)]
    assert not breaches, "\n".join(breaches)


def find_inner_rows(name: str) -> dict[str, tuple[str, int]]:
    """Return, for each room around a module, its folder or file in that room, and the row of that."""
    found = {}
    for outer, rows in INNER.items():
        if name.startswith(f"{outer}."):
            inner = name.removeprefix(f"{outer}.").split(".")[0]
            found[outer] = inner, next(i for i, row in enumerate(rows) if inner in row)
    return found


def test_imports_go_down_inside_of_rooms() -> None:
    for name in modules():
        for other in imports(name):
            theirs = find_inner_rows(other)
            for outer, (inner, row) in find_inner_rows(name).items():
                target, below = theirs.get(outer, (inner, row))
                assert target == inner or below < row, f"{name} imports {other}: {target} is not below {inner}"


def test_every_inner_room_says_what_it_is_for_and_can_be_read_at_a_glance() -> None:
    folders = {path.parent for path in modules().values()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").read_text().startswith('"""')] == []
    counts = {str(folder): len(list(folder.glob("*.py"))) - 1 for folder in folders}
    assert {folder: n for folder, n in counts.items() if n > MAX_LOOSE} == {}


def test_no_pass_imports_a_pass() -> None:
    names = [name for name in modules() if room(name) == "passes" and name != "passes"]
    assert names
    for name in names:
        own = name.split(".")[1]
        others = {other for other in imports(name) if room(other) == "passes"}
        assert all(other.split(".")[1:2] == [own] for other in others), f"{name} imports {others}"


def test_nothing_imports_what_is_beside_the_package() -> None:
    """The wheel has no tests, no bench, and no package called passes."""
    beside = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"fxsplit"}
    assert {"bench", "passes", "tests"} <= beside
    found = [(name, full) for name in modules() for _, full in imported(name) if full.split(".")[0] in beside]
    assert found == []


def test_tests_import_bench_and_bench_imports_only_what_tests_share() -> None:
    """tests/support is below bench, and bench is below the other tests. Code in strings counts too."""
    may_import = {"tests/support": ("tests.support",), "bench": ("tests.support", "bench")}
    found = [
        (str(path.relative_to(ROOT)), full)
        for folder, below in may_import.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
        for full in re.findall(r"^\s*(?:from|import) ((?:tests|bench)\b[\w.]*)", path.read_text("utf-8"), re.MULTILINE)
        if not any(full == name or full.startswith(f"{name}.") for name in below)
    ]
    assert found == [], f"move what both need to tests/support: {found}"


def test_no_import_cycle() -> None:
    graph = nx.DiGraph((name, other) for name in modules() for other in imports(name))
    graph.remove_edges_from([(a, b) for a, b in graph.edges if b == ""])
    assert list(nx.simple_cycles(graph)) == []


UNLOADED = {
    "import fxsplit": {"torch", "numba", "numpy"},
    "import fxsplit.planner, fxsplit.schedule, fxsplit.formats.read, fxsplit.report": {"torch", "numba"},
    "import fxsplit.api.plan, fxsplit.cli.main, fxsplit.cli.plan, fxsplit.cli.simulate": {"torch", "numba"},
    # torch takes seconds to load its compilers.
    "import fxsplit.api.compile, fxsplit.api.pipeline.pipeline": {"torch._dynamo", "torch.distributed.pipelining"},
}
"""Modules that must not be loaded after each of these lines, which run in this order."""


def test_planning_loads_neither_torch_nor_numba_and_compile_no_compiler_of_torch() -> None:
    lines = [f"{code}; print(*({names!r} & set(sys.modules)))" for code, names in UNLOADED.items()]
    script = "\n".join(["import sys", *lines])
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [""] * len(UNLOADED), UNLOADED


def test_passes_is_a_link() -> None:
    link = ROOT / "fxsplit" / "passes"
    assert link.is_symlink() and os.readlink(link) == "../passes"
