"""Everything public has a docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.sources import modules, tree

Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def public(name: str) -> Iterator[tuple[str, Documented]]:
    """Yield a module, and its public classes, methods and functions.

    The property of a setter, and the function of an overload, have the docstring.
    """
    yield name, tree(name)
    for node in tree(name).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            yield f"{name}.{node.name}", node
            for inner in node.body if isinstance(node, ast.ClassDef) else []:
                marks = [ast.unparse(d) for d in getattr(inner, "decorator_list", [])]
                setter = any("setter" in mark or mark == "overload" for mark in marks)
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_") and not setter:
                    yield f"{name}.{node.name}.{inner.name}", inner


def test_what_is_public_has_a_docstring() -> None:
    assert [place for name in modules() for place, node in public(name) if not ast.get_docstring(node)] == []
