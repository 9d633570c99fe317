"""The list of torch's private names in use: complete, all there in the installed torch, and missed by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fxsplit.errors import TorchError
from fxsplit.torch_internals import needs
from fxsplit.torch_internals.needs import LATE, NEEDED, require
from fxsplit.torch_internals.thread_modes import disable_compilers
from fxsplit.torch_internals.torch_compile.stage_backends import records_cuda_graphs
from tests.house.names_used import private_uses
from tests.house.sources import modules, room

ROOMS = ("torch_internals", "frontend")
NAMES = [name for listed in (*NEEDED, *LATE) for name in listed.split(" or ")]


class Without:
    """Stands for torch, or for an object of torch's, and lacks one name at some place below it."""

    def __init__(self, whole: object, missing: Sequence[str]) -> None:
        self._whole, self._missing = whole, missing

    def __getattr__(self, name: str) -> object:
        first, *rest = self._missing
        if name != first:
            return getattr(self._whole, name)
        if not rest:
            raise AttributeError(name)
        return Without(getattr(self._whole, name), rest)


def take_away(monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    """Let `require` look in a torch that has none of the names in "a or b"."""
    whole: Any = torch
    for name in listed.split(" or "):
        whole = Without(whole, name.split(".")[1:])
        # A module is found by its name as well.
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(needs, "torch", whole)


def test_what_is_used_is_listed() -> None:
    used = [(name, full) for name in modules() if room(name) in ROOMS for full in sorted(private_uses(name, "torch"))]
    assert len(used) > len({name for name, _ in used})  # all of a module's uses, and not one of them
    for name, full in used:
        listed = any(f"{one}.".startswith(f"{full}.") or f"{full}.".startswith(f"{one}.") for one in NAMES)
        assert listed, f"{name} uses {full}: list it in torch_internals/needs.py"


def test_what_is_listed_is_used() -> None:
    code = [path.read_text(encoding="utf-8") for other, path in modules().items() if room(other) in ROOMS]
    for name in NAMES:
        last = name.rsplit(".", 1)[1]
        # Names of modules' hooks are put together from two parts.
        assert sum(last.removeprefix("_global") in text for text in code) > 1, f"{name} is in no file but the list"


def test_a_torch_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It half worked: without a flag of torch.fx's, models were exported in place of being traced."""
    for listed in NEEDED:
        require([listed])
        with monkeypatch.context() as without:
            take_away(without, listed)
            with pytest.raises(TorchError) as caught:
                require(NEEDED)
        said = f"torch {torch.__version__} has no {listed}, on which fxsplit relies: install"
        assert str(caught.value).startswith(said)


def test_the_error_says_how_much_more_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, "torch._C")
    with pytest.raises(ImportError, match=r"has no torch\._C\._storage_Use_Count and \d+ more, on which"):
        require(NEEDED)


def test_what_takes_long_to_load_is_missed_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    require(LATE)
    take_away(monkeypatch, "torch._dynamo.eval_frame._set_stance")
    with pytest.raises(TorchError, match=r"has no torch\._dynamo\.eval_frame\._set_stance, on"), disable_compilers():
        pass
    take_away(monkeypatch, "torch._inductor.config.triton.cudagraphs")
    with pytest.raises(TorchError, match=r"has no torch\._inductor\.config\.triton\.cudagraphs"):
        records_cuda_graphs("inductor")


def test_what_is_missing_is_said_before_any_of_it_is_imported() -> None:
    """In a process of its own, in which torch loses a name before fxsplit is imported; planning goes on without it."""
    code = """
import torch
from torch.autograd import graph
del graph._engine_run_backward
import fxsplit.planner, fxsplit.schedule
for name in ("fxsplit.torch_internals.autograd.sums", "fxsplit.frontend.capture", "fxsplit.api.compile"):
    try:
        __import__(name)
    except fxsplit.FxsplitError as error:
        print(str(error).partition(", on which")[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        done.stdout.splitlines() == [f"torch {torch.__version__} has no torch.autograd.graph._engine_run_backward"] * 3
    )
