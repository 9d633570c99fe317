"""Read the project's own code: its modules, their imports, and their functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def modules() -> dict[str, Path]:
    """Return every module of fxsplit by its dotted name below the package; `passes` lies in the folder passes/.

    The package's own `__init__.py` has the empty name.
    """
    found = {}
    for folder, prefix in ((ROOT / "fxsplit", ()), (ROOT / "passes", ("passes",))):
        for path in sorted(folder.rglob("*.py")):
            below = path.relative_to(folder).with_suffix("").parts
            if prefix or below[0] != "passes":  # fxsplit/passes is a link to passes/
                found[".".join(part for part in (*prefix, *below) if part != "__init__")] = path
    return found


@cache
def tree(name: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def room(name: str) -> str:
    """Return the room of a module: the first folder of its name."""
    return name.split(".")[0]


def imported(name: str) -> Iterator[tuple[str, str]]:
    """Yield a module's imports, as (the name inside the module, the full name); relative imports are made absolute."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
                yield alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            package = [*_package(name)[: 1 - node.level or None], *filter(None, [node.module])] if node.level else []
            base = ".".join(package) or str(node.module)
            for alias in node.names:
                yield alias.asname or alias.name, f"{base}.{alias.name}"
        # importlib.import_module("fxsplit.api") is an import too.
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (("", str(arg.value)) for arg in node.args if isinstance(arg, ast.Constant))


def _package(name: str) -> list[str]:
    """Return the package that a module lies in, as the parts of its name: a package lies in itself."""
    parts = ["fxsplit", *filter(None, name.split("."))]
    return parts if modules()[name].name == "__init__.py" else parts[:-1]


@cache
def imports(name: str) -> frozenset[str]:
    """Return the modules of fxsplit that a module imports, at its top or inside its functions."""
    found = set()
    for _, full in imported(name):
        package, _, below = full.partition(".")
        # The last part may be a name in the module, or in the package itself.
        found |= {below if below in modules() else below.rpartition(".")[0]} if package == "fxsplit" else set()
    return frozenset(found)


def functions(name: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function and method of a module, each with `module:line name`."""
    for node in ast.walk(tree(name)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{name}:{node.lineno} {node.name}", node


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function's body, without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of a function's parameters, without `self` and `cls`."""
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def is_private(name: str) -> bool:
    """Return whether a name is private to its file: one underscore in front, and not two around it."""
    return name.startswith("_") and not name.startswith("__")


def files_of_tests() -> Iterator[Path]:
    """Yield every file of tests, as a path below tests/."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        yield path.relative_to(ROOT / "tests")
