"""What is public says what it is for."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.sources import modules, tree

Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def public(name: str) -> Iterator[tuple[str, Documented]]:
    """Yield a module, and its public classes, methods and functions; a setter says what its property does."""
    yield name, tree(name)
    for node in tree(name).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            yield f"{name}.{node.name}", node
            for inner in node.body if isinstance(node, ast.ClassDef) else []:
                setter = any("setter" in ast.unparse(d) for d in getattr(inner, "decorator_list", []))
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_") and not setter:
                    yield f"{name}.{node.name}.{inner.name}", inner


def test_what_is_public_has_a_docstring() -> None:
    assert [place for name in modules() for place, node in public(name) if not ast.get_docstring(node)] == []
