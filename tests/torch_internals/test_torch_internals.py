"""The list of torch's private parts in use: complete, and each of them there in the installed torch."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from fxsplit import torch_internals

FOLDER = Path(torch_internals.__file__).parent
LISTED: dict[str, list[str]] = {
    name: files.split(", ")
    for name, files in re.findall(r"^- (torch\S+)(?: and its \S+)?: ([a-z_, ]+)$", torch_internals.__doc__ or "", re.M)
}


@pytest.mark.parametrize("name", list(LISTED))
def test_what_is_listed_exists_in_torch(name: str) -> None:
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[:i]))


def test_what_is_used_is_listed() -> None:
    """Private names that a file imports from torch, and private attributes of torch by their full path."""
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            used = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                used = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                used = [ast.unparse(node)] if ast.unparse(node).startswith("torch.") else []
            for name in used:
                if re.search(r"\._[a-zA-Z]", name):
                    assert any(
                        f"{name}.".startswith(f"{one}.") or f"{one}.".startswith(f"{name}.") for one in LISTED
                    ), f"{path.name} uses {name}: list it in torch_internals/__init__.py"


@pytest.mark.parametrize("name", list(LISTED))
def test_what_is_listed_is_used(name: str) -> None:
    last = name.rsplit(".", 1)[1]
    assert any(last in (FOLDER / f"{file}.py").read_text(encoding="utf-8") for file in LISTED[name]), LISTED[name]
