"""A misspelt name is answered with the one that was meant, wherever names are typed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.errors import FxsplitError, suggest
from fxsplit.formats.machine_toml import read_machine
from fxsplit.formats.plan_json import read_plan
from fxsplit.ir.chain import parse_chain
from fxsplit.passes import PASSES, Cut, Partition, Profile
from fxsplit.runtime.ranks.hooks.hooks import HookChoice
from fxsplit.schedule.torch_csv import read_csv
from tests.support.models import FAST, Mlp


def test_the_nearest_name_is_suggested_whatever_its_case() -> None:
    assert suggest("1f1b", ["GPipe", "1F1B"]) == "; did you mean '1F1B'?"
    assert suggest("always", {"allways": 1}) == "; did you mean 'allways'?"
    assert suggest("xyz", ["GPipe"]) == suggest("x", []) == suggest(3, ["GPipe"]) == ""


def read(text: str, folder: Path) -> object:
    """Read a machine."""
    (folder / "m.toml").write_text(text)
    return read_machine(folder / "m.toml")


def make_blocks() -> nn.Module:
    return nn.Sequential(OrderedDict(block1=nn.Sequential(OrderedDict(linear=nn.Linear(8, 8))), block2=nn.Linear(8, 8)))


def compile_for_rows(**options: Any) -> object:
    """Compile a model for a batch, whose argument is called `input`."""
    return fxsplit.compile(make_blocks(), 2, example_inputs=torch.randn(4, 8), **({"passes": FAST} | options))


def misspell(folder: Path, name: str, typed: str) -> Path:
    """Return the path of a file that is not there, beside one of a near name."""
    (folder / name).write_text("")
    return folder / typed


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        (lambda _: fxsplit.compile(Mlp(), 2, schedule="1f1b"), "1F1B"),  # type: ignore[arg-type]
        (lambda _: fxsplit.compile(Mlp(), 2, recompute="allways"), "always"),  # type: ignore[arg-type]
        (lambda _: fxsplit.compile(Mlp(), 2, compress="int_8"), "int8"),  # type: ignore[arg-type]
        (lambda _: fxsplit.compile(Mlp(), 2, stage_backend="inductr"), "inductor"),
        (lambda _: HookChoice("topkk"), "topk"),
        (lambda _: Partition(model="forward"), "forwarded"),
        (lambda _: Partition(recompute="nevr"), "never"),
        (lambda _: Profile(tied="replicate"), "replicated"),
        (lambda _: Cut(compress="bf_16"), "bf16"),
        (lambda _: parse_chain("profil", PASSES), "profile"),
        (lambda _: parse_chain("profile{repeat=3}", PASSES), "repeats"),
        (lambda _: fxsplit.DEFAULT.before("partitoin", Cut()), "partition"),
        (lambda folder: read('[[devices]]\nname = "a"\nmemory_byts = 1.0\n', folder), "memory_bytes"),
        (lambda folder: read('byts_per_s = 1.0\n[[devices]]\nname = "a"\n', folder), "bytes_per_s"),
        (lambda _: fxsplit.compile(Mlp(), ["cud:0"] * 2), "cuda"),
        (lambda _: compile_for_rows(chunks={"inputs": 0}), "input"),
        (lambda _: compile_for_rows(passes=[fxsplit.leaf("block1.linaer"), *fxsplit.DEFAULT]), "block1.linear"),
        (lambda folder: fxsplit.plan(misspell(folder, "net.json", "nett.json"), 2), "net.json"),
        (lambda folder: read_machine(misspell(folder, "cluster.toml", "cluster.tml")), "cluster.toml"),
        (lambda folder: read_plan(misspell(folder, "plan.json", "plans.json")), "plan.json"),
        (lambda folder: read_csv(misspell(folder, "zb.csv", "zb1.csv")), "zb.csv"),
    ],
)
def test_every_name_is_suggested(name: Callable[[Path], object], meant: str, tmp_path: Path) -> None:
    with pytest.raises(FxsplitError, match=f"did you mean {meant!r}"):
        name(tmp_path)


def test_a_public_name_is_suggested() -> None:
    with pytest.raises(AttributeError, match=r"fxsplit has no 'compil': .*; did you mean 'compile'\?"):
        fxsplit.compil  # noqa: B018
