"""The names of a package that the project's own code uses."""

from __future__ import annotations

import ast

from tests.house.sources import imported, is_private, tree


def dotted(node: ast.expr) -> list[str]:
    """Return the names of `a.b.c`, or of `getattr(a.b, "c")`; an empty list for any other expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Call) and dotted(node.func) == ["getattr"] and isinstance(node.args[1], ast.Constant):
        return [*dotted(node.args[0]), str(node.args[1].value)]
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return [*base, node.attr]
    return []


def uses(name: str, package: str) -> set[str]:
    """Return the names of `package` that a module imports, or reads as attributes of its imports."""
    known = {own: full for own, full in imported(name) if full.split(".")[0] == package}
    used = set(known.values())
    for node in ast.walk(tree(name)):
        if isinstance(node, (ast.Attribute, ast.Call)) and (parts := dotted(node)) and parts[0] in known:
            used.add(".".join([known[parts[0]], *parts[1:]]))
    return used


def private_uses(name: str, package: str) -> set[str]:
    """Return the private names among these."""
    return {full for full in uses(name, package) if any(is_private(part) for part in full.split("."))}
