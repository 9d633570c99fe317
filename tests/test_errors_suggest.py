"""A misspelt name is answered with the one that was meant, wherever names are typed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import fxsplit
from fxsplit.errors import FxsplitError, suggest
from fxsplit.formats.machine_toml import read_machine
from fxsplit.ir.chain import parse_chain
from fxsplit.passes import PASSES, Cut, Partition, Profile
from fxsplit.runtime.ranks.hooks.hooks import HookChoice
from tests.support.models import Mlp


def test_the_nearest_name_is_suggested_whatever_its_case() -> None:
    assert suggest("1f1b", ["GPipe", "1F1B"]) == "; did you mean '1F1B'?"
    assert suggest("always", {"allways": 1}) == "; did you mean 'allways'?"
    assert suggest("xyz", ["GPipe"]) == suggest("x", []) == suggest(3, ["GPipe"]) == ""


def read(text: str, folder: Path) -> object:
    """Read a machine."""
    (folder / "m.toml").write_text(text)
    return read_machine(folder / "m.toml")


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
    ],
)
def test_every_name_is_suggested(name: Callable[[Path], object], meant: str, tmp_path: Path) -> None:
    with pytest.raises(FxsplitError, match=f"did you mean {meant!r}"):
        name(tmp_path)
