"""The owner of an object: Python, torch, a package, or the user."""

from __future__ import annotations

import builtins
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxsplit.frontend.restore.library_objects import (
    find_foreign,
    holds_tensors,
    is_definition,
    is_imported,
    is_installed,
    is_library,
    is_namespace,
)

TABLE = {"a": 1}


@pytest.mark.parametrize("value", [vars(builtins), vars(math), sys.modules, globals(), vars(types.ModuleType("made"))])
def test_the_dict_of_a_module_is_a_namespace(value: Any) -> None:
    assert is_namespace(value)


def test_other_dicts_are_none() -> None:
    made: dict[str, Any] = {}
    exec("def f(): pass", made)
    assert not any(map(is_namespace, (made, TABLE, vars(nn.Linear(2, 2)), [], None)))


def test_what_is_installed_is_a_librarys() -> None:
    assert is_installed("torch.nn") and is_installed("json") and is_installed("pytest")
    assert not is_installed(__name__) and not is_installed("no such module")
    assert is_library(math) and not is_library(sys.modules[__name__])


def test_containers_of_libraries_are_known() -> None:
    found = find_foreign()
    assert id(sys.path) in found and id(TABLE) not in found


def test_what_a_call_has_imported() -> None:
    class Made:
        pass

    assert is_imported(None, math, ()) and not is_imported(1, math, ())
    assert is_imported(None, Path, ()) and not is_imported(None, Path, sys.modules.keys())
    assert is_imported(None, nn.Linear(2, 2), ()) and not is_imported(None, 3, ())
    assert is_definition(None, Made) and not is_definition(Made, Made) and not is_definition(None, 3)


def test_tensors_and_what_stands_for_them() -> None:
    tracer = fx.Tracer()
    tracer.graph = fx.Graph()
    proxy = fx.Proxy(tracer.graph.placeholder("x"), tracer)
    assert holds_tensors({"a": [torch.ones(2)]}) and holds_tensors((1, proxy))
    assert not holds_tensors({"a": 1}) and not holds_tensors("text")
