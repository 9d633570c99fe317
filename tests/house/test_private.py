"""Private names stay in place: torch's in two rooms, fxsplit's in one file; and the runtime knows no IR."""

from __future__ import annotations

import ast

from torch import nn

from tests.house.names_used import private_uses, uses
from tests.house.sources import imported, imports, is_private, modules, room, tree

KNOW_TORCH = {"torch_internals", "frontend"}


def test_private_parts_of_torch_are_named_in_two_rooms() -> None:
    found = {name: private_uses(name, "torch") for name in modules() if room(name) not in KNOW_TORCH}
    assert {name: used for name, used in found.items() if used} == {}


def test_private_names_stay_in_their_file() -> None:
    found = {name: private_uses(name, "fxsplit") for name in modules()}
    assert {name: used for name, used in found.items() if used} == {}


def private_names(name: str) -> set[str]:
    """Return the private functions, methods and attributes that a module defines."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {one for one in found if is_private(one)}


def test_private_attributes_of_objects_stay_in_their_file() -> None:
    """Such as `job._sums` in a second module: the name `job` does not show the module that defines `_sums`."""
    # torch.nn.Module's own attributes, such as `module._buffers`, share their names with some of ours.
    defined = {name: private_names(name) - {*dir(nn.Module())} for name in modules()}
    found = []
    for name in modules():
        others = set().union(*(names for other, names in defined.items() if other != name)) - defined[name]
        read = [n for n in ast.walk(tree(name)) if isinstance(n, ast.Attribute) and n.attr in others]
        found += [(name, ast.unparse(node)) for node in read]
    assert found == []


def test_the_runtime_knows_no_ir() -> None:
    """A process needs only stages, a schedule and devices to run: of the room ir, only facts."""
    found = [(name, other) for name in modules() if room(name) == "runtime" for other in imports(name)]
    known = [(name, other) for name, other in found if room(other) == "ir"]
    assert [each for each in known if not each[1].startswith("ir.facts.")] == []
    assert [name for name in modules() if room(name) == "runtime" and "fxsplit.IR" in uses(name, "fxsplit")] == []


def test_the_planner_and_schedules_never_name_torch() -> None:
    """Not even inside a function: planning from a profile works without torch."""
    found = [(name, full) for name in modules() for _, full in imported(name) if full.split(".")[0] == "torch"]
    assert found and [each for each in found if room(each[0]) in ("errors", "planner", "schedule")] == []


def test_only_kernels_import_numba() -> None:
    """Compiling a kernel takes seconds, so planning a small model must not load numba."""
    users = {name for name in modules() for _, full in imported(name) if full.split(".")[0] == "numba"}
    assert users and all("kernels" in name.split(".") for name in users), users
