"""What is private stays where it is: torch's in two rooms, fxsplit's in one file; and the runtime knows no IR."""

from __future__ import annotations

import ast

from tests.house.sources import imported, is_private, modules, room, tree

KNOW_TORCH = {"torch_internals", "frontend"}


def dotted(node: ast.expr) -> list[str]:
    """Return the names of `a.b.c`, or of `getattr(a.b, "c")`; none where the expression is something else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Call) and dotted(node.func) == ["getattr"] and isinstance(node.args[1], ast.Constant):
        return [*dotted(node.args[0]), str(node.args[1].value)]
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return [*base, node.attr]
    return []


def uses(name: str, package: str) -> set[str]:
    """Return the names of `package` that a module imports or reads as attributes of what it imports."""
    known = {own: full for own, full in imported(name) if full.split(".")[0] == package}
    used = set(known.values())
    for node in ast.walk(tree(name)):
        if isinstance(node, (ast.Attribute, ast.Call)) and (parts := dotted(node)) and parts[0] in known:
            used.add(".".join([known[parts[0]], *parts[1:]]))
    return used


def private_uses(name: str, package: str) -> set[str]:
    """Return the private ones of these names."""
    return {full for full in uses(name, package) if any(is_private(part) for part in full.split("."))}


def test_private_parts_of_torch_are_named_in_two_rooms() -> None:
    found = {name: private_uses(name, "torch") for name in modules() if room(name) not in KNOW_TORCH}
    assert {name: used for name, used in found.items() if used} == {}


def test_private_names_stay_in_their_file() -> None:
    found = {name: private_uses(name, "fxsplit") for name in modules()}
    assert {name: used for name, used in found.items() if used} == {}


def test_the_runtime_knows_no_ir() -> None:
    """Stages, a schedule and places are all that another process would need."""
    ir = ["fxsplit.IR", "fxsplit.ir.IR", "fxsplit.ir.graph"]
    found = [(name, full) for name in modules() if room(name) == "runtime" for full in uses(name, "fxsplit")]
    assert [(name, full) for name, full in found if f"{full}.".startswith(tuple(f"{one}." for one in ir))] == []


def test_only_kernels_import_numba() -> None:
    """Compiling takes seconds: whoever plans a small model never loads numba."""
    users = {name for name in modules() for _, full in imported(name) if full.split(".")[0] == "numba"}
    assert users and all("kernels" in name.split(".") for name in users), users
