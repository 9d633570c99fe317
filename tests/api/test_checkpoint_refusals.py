"""What is no checkpoint, or one of something else, is refused by name before anything changes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import fxsplit
from fxsplit.errors import InputError
from tests.checkpoints import Net, build, save_three_steps


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    return save_three_steps(tmp_path)


def change(path: Path, **values: Any) -> None:
    file = path / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


class Narrower(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[4] = nn.Identity()


class Other(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[4] = nn.Linear(8, 8).double()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: (Wider(), None), r"step-3' does not hold 'more.weight': build the model as the checkpoint's was"),
        (lambda: (Narrower(), None), r"step-3' holds 'blocks.4.\w+', which the model does not have"),
        (lambda: (Other(), None), r"'blocks.4.weight' is torch.float32 \(8, 8\) in .* and torch.float64 \(8, 8\) in"),
        (lambda: build(make=lambda m: torch.optim.SGD(m.parameters())), r"holds AdamW, and SGD is to be loaded"),
        (
            lambda: build(make=lambda m: torch.optim.AdamW(m.parameters())),
            r"'blocks.0.bias' and 'words.weight' are in one group of the optimizer, and had other options",
        ),
    ],
)
def test_what_is_not_as_it_was_is_refused_before_anything_changes(
    saved: tuple[Path, dict[str, Any]], make: Callable[[], tuple[nn.Module, Optimizer | None]], message: str
) -> None:
    path, _ = saved
    model, optimizer = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=message):
        fxsplit.load_checkpoint(path, model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "values",
    [
        {"format": "x"}, {"version": 2}, {"step": "three"}, {"step": -1}, {"files": ["../../etc/passwd"]},
        {"files": [3]}, {"files": ["gone.safetensors"]}, {"tied": 3}, {"tied": {"a": 1}}, {"groups": [{"no": 1}]},
        {"groups": [{"parameters": [1], "options": {}}]}, {"extra": []}, {"more": 1},
    ],
)  # fmt: skip
def test_a_manifest_is_read_as_data_and_checked(saved: tuple[Path, dict[str, Any]], values: dict[str, Any]) -> None:
    path, _ = saved
    change(path, **values)
    with pytest.raises(InputError, match=r"checkpoint.json"):
        fxsplit.load_checkpoint(path, *build())


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"format": "fxsplit checkpoint", "version": 1}'])
def test_a_broken_manifest_is_an_input_error(saved: tuple[Path, dict[str, Any]], text: str) -> None:
    path, _ = saved
    (path / "checkpoint.json").write_text(text)
    with pytest.raises(InputError, match=r"checkpoint.json"):
        fxsplit.load_checkpoint(path, *build())


def test_a_file_that_is_cut_short_is_an_input_error(saved: tuple[Path, dict[str, Any]]) -> None:
    path, _ = saved
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(InputError, match=r"model.safetensors"):
        fxsplit.load_checkpoint(path, *build())


def test_what_no_checkpoint_holds_is_refused(tmp_path: Path) -> None:
    model, optimizer = build()
    save: Any = fxsplit.save_checkpoint
    for arguments, message in (
        ({"step": -1}, "step=-1: give how many steps were made"),
        ({"step": 1, "keep": 0}, "keep=0: give how many checkpoints are to stay"),
        ({"step": 1, "extra": {"a": object()}}, "a checkpoint cannot hold"),
    ):
        with pytest.raises(InputError, match=message):
            save(tmp_path, model, optimizer, **arguments)
    with pytest.raises(InputError, match=r"the optimizer has a parameter of shape \(2, 2\) that the model does not"):
        save(tmp_path, model, torch.optim.SGD(nn.Linear(2, 2).parameters()), step=1)
    with pytest.raises(InputError, match="model is a list"):
        save(tmp_path, [], step=1)
    with pytest.raises(InputError, match="'a' has no values yet"):
        with torch.device("meta"):
            module = nn.ParameterDict({"a": torch.zeros(2)})
        save(tmp_path, module, step=1)
    with pytest.raises(InputError, match="there is no complete checkpoint in"):
        fxsplit.load_checkpoint(tmp_path, model)
    assert [*tmp_path.iterdir()] == []
