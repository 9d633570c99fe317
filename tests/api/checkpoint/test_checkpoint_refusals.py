"""Damaged or foreign checkpoints are refused by name before anything changes."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

import fxsplit
from fxsplit.api.checkpoint import checkpoint
from fxsplit.api.checkpoint import storage as checkpoint_storage
from fxsplit.errors import InputError
from tests.support.checkpoints import Net, build, save_three_steps, step


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
        {"groups": [{"parameters": [1], "options": {}}]}, {"extra": []}, {"more": 1}, {"training": []},
        {"training": {"random.cpu": 3}}, {"extra_notes": {}}, {"optimizer": 3}, {"versions": []}, {"files": {}},
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


class Shown(nn.Linear):
    """Its state_dict() has copies, and load_state_dict() would not write to the originals."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"kernel": self.weight.detach().clone(), "bias": self.bias}


@pytest.mark.parametrize("key", ["all", nn.Parameter(torch.zeros(3))])
def test_what_would_not_come_back_is_refused_when_it_is_saved(tmp_path: Path, key: Any) -> None:
    """State under keys that are not parameters, or made by state_dict() itself, must not be lost silently."""
    with pytest.raises(InputError, match="state_dict\\(\\) of Shown makes a new 'kernel' in each call"):
        fxsplit.save_checkpoint(tmp_path, Shown(2, 2), step=1)
    model, optimizer = build()
    optimizer.state[key]["count"] = 3
    with pytest.raises(InputError, match=r"keeps 'count' under ('all'|a tensor of shape \(3,\)), which is in none"):
        fxsplit.save_checkpoint(tmp_path, model, optimizer, step=1)
    assert [*tmp_path.iterdir()] == []


def test_a_tensor_that_repeats_its_numbers_takes_no_others(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model.register_buffer("scale", torch.rand(3, 4))
    other.register_buffer("scale", torch.rand(3, 1).expand(3, 4))
    saved = fxsplit.save_checkpoint(tmp_path, model, step=1).wait()
    before = other.weight.clone()
    with pytest.raises(InputError, match="'scale' repeats its numbers in the model"):
        fxsplit.load_checkpoint(saved, other)
    assert torch.equal(other.weight, before)


# Anything in a folder that differs from its manifest is refused before the first write.


def read_all(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return copies of everything that a load may write to."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    state = {names[id(w)]: kept for w, kept in optimizer.state.items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return copy.deepcopy({"model": model.state_dict(), "state": state, "groups": groups, "cpu": torch.get_rng_state()})


def is_alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_alike(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(is_alike, a, b)) if isinstance(a, list) else bool(a == b)


def refuse(path: Path, message: str, make: Any = None) -> None:
    """Load into another model with an optimizer that has state, and check that nothing changes."""
    model, optimizer = build(seed=3, **({"make": make} if make else {}))
    step(model, optimizer)
    before = read_all(model, optimizer)
    with pytest.raises(InputError, match=message):
        fxsplit.load_checkpoint(path, model, optimizer)
    assert is_alike(read_all(model, optimizer), before)


def edit(path: Path, values: dict[str, Tensor | None], *, noted: bool) -> None:
    """Replace or remove tensors besides the weights; `noted`: let the manifest list them as if they had been saved."""
    file, manifest = path / "training.safetensors", json.loads((path / "checkpoint.json").read_text())
    found = {name: value for name, value in (load_file(file) | values).items() if value is not None}
    save_file(found, file)
    training = {name: checkpoint_storage.name_kind(value) for name, value in found.items()}
    change(path, training=training if noted else manifest["training"])


BIAS, WEIGHT = "optimizer.blocks.0.bias", "optimizer.blocks.0.weight"
KINDS: dict[str, dict[str, Tensor | None]] = {
    "another shape": {f"{WEIGHT}.exp_avg": torch.zeros(3)},
    "one element": {f"{WEIGHT}.exp_avg": torch.ones(1)},
    "the same number of elements": {f"{WEIGHT}.exp_avg": torch.zeros(4, 16)},
    "another dtype": {f"{WEIGHT}.exp_avg": torch.zeros(8, 8, dtype=torch.float64)},
    "whole numbers": {f"{WEIGHT}.exp_avg": torch.zeros(8, 8, dtype=torch.int64)},
    "one missing": {f"{WEIGHT}.exp_avg_sq": None},
    "a parameter missing": {f"{BIAS}.{key}": None for key in ("exp_avg", "exp_avg_sq", "step")},
    "one too many": {f"{WEIGHT}.momentum_buffer": torch.zeros(8, 8)},
    "a parameter that is not there": {"optimizer.gone.exp_avg": torch.zeros(8)},
    "random numbers that are not there": {"random.cpu": None},
    "random numbers of another device": {"random.cuda": torch.zeros(16, dtype=torch.uint8)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_are_not_as_they_were_written_are_refused(saved: tuple[Path, dict[str, Any]], kind: str) -> None:
    path, _ = saved
    edit(path, KINDS[kind], noted=False)
    refuse(path, r"and was (\w+ \[.*\]|not there) when it was saved")


CONTENTS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "random numbers of another length": ({"random.cpu": torch.zeros(5, dtype=torch.uint8)}, "random_state=False"),
    "random numbers of another dtype": ({"random.cpu": torch.zeros(5056)}, "no state of random numbers of this torch"),
    "random numbers that are none": ({"random.cpu": torch.full((5056,), 255, dtype=torch.uint8)}, "'random.cpu' in"),
    "a value that is no JSON": ({"json.blocks.0.bias.x": torch.tensor([1, 2], dtype=torch.uint8)}, "read as JSON"),
    "a value that is no text": ({"json.blocks.0.bias.x": torch.ones(2, 2)}, "and no text"),
    "a typed value without notes": (
        {"typed.blocks.0.bias.x": torch.tensor([*b"[1]"], dtype=torch.uint8)}, "cannot be read as JSON",
    ),
    "a value of code": (
        {"typed.blocks.0.bias.x": torch.tensor([*b'[[1], [[[], "eval"]]]'], dtype=torch.uint8)}, "the unknown type",
    ),
    "a parameter that the optimizer does not have": ({"optimizer.gone.exp_avg": torch.zeros(8)}, "no such parameter"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONTENTS)
def test_contents_are_checked_too(saved: tuple[Path, dict[str, Any]], kind: str) -> None:
    path, _ = saved
    values, message = CONTENTS[kind]
    edit(path, values, noted=True)
    refuse(path, message)


def test_random_numbers_of_another_torch_are_no_matter_without_them(saved: tuple[Path, dict[str, Any]]) -> None:
    path, _ = saved
    edit(path, {"random.cpu": torch.zeros(5, dtype=torch.uint8)}, noted=True)
    assert fxsplit.load_checkpoint(path, *build(), random_state=False).step == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", "0.1"), ("lr", math.nan), ("lr", math.inf), ("lr", None), ("lr", True), ("lr", [0.1]), ("betas", 0.9),
        ("betas", [0.9]), ("betas", [0.9, "0.99"]), ("betas", [0.9, math.nan]), ("amsgrad", 1), ("amsgrad", "no"),
        ("weight_decay", {}), ("initial_lr", math.nan), ("eps", "1e-8"),
    ],
)  # fmt: skip
def test_options_of_groups_are_checked(saved: tuple[Path, dict[str, Any]], key: str, value: Any) -> None:
    path, _ = saved
    groups = json.loads((path / "checkpoint.json").read_text())["groups"]
    groups[1]["options"][key] = value
    change(path, groups=groups)
    refuse(path, f"the optimizer has {key}=.* holds {key}=.*: give the optimizer that was saved")


def test_an_option_that_is_gone_is_refused(saved: tuple[Path, dict[str, Any]]) -> None:
    path, _ = saved
    groups = json.loads((path / "checkpoint.json").read_text())["groups"]
    del groups[0]["options"]["lr"]
    change(path, groups=groups)
    refuse(path, "holds no 'lr' of the optimizer")


def test_numbers_that_are_infinite_on_purpose_are_loaded(tmp_path: Path) -> None:
    def make(model: nn.Module) -> Optimizer:
        return torch.optim.SGD([{"params": model.parameters(), "limit": math.inf}], lr=0.1)

    model, optimizer = build(make=make)
    fxsplit.save_checkpoint(tmp_path, model, optimizer, step=1).wait()
    optimizer.param_groups[0]["lr"] = 0.7
    fxsplit.load_checkpoint(tmp_path, model, optimizer)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["limit"]) == (0.1, math.inf)


def split(model: nn.Module, *sizes: int) -> list[dict[str, Any]]:
    weights, groups = [*model.parameters()], []
    for size in sizes:
        groups.append({"params": weights[:size], "lr": 0.1 * len(weights)})
        weights = weights[size:]
    return groups


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([3], r"was in a group of the optimizer in .*, and is in none now: give the optimizer the same parameters"),
        ([8], r"'\S+' and '\S+' are in one group of the optimizer, and had other options"),
        ([2, 6], r"'\S+' and '\S+' are in one group of the optimizer, and had other options"),
        ([4, 2, 2], r"had 2 groups in .*, of \[4, 4\] parameters, and has 3 now, of \[4, 2, 2\]"),
        ([4, 3], "and is in none now"),
    ],
)
def test_groups_are_those_that_were_saved(tmp_path: Path, sizes: list[int], message: str) -> None:
    model, optimizer = build(make=lambda m: torch.optim.AdamW(split(m, 4, 4)))
    assert len([*model.parameters()]) == 8
    step(model, optimizer)
    fxsplit.save_checkpoint(tmp_path, model, optimizer, step=1).wait()
    refuse(tmp_path, message, make=lambda m: torch.optim.AdamW(split(m, *sizes)))
    other, its = build(make=lambda m: torch.optim.AdamW([*reversed(split(m, 4, 4))]))
    fxsplit.load_checkpoint(tmp_path, other, its)  # their order does not matter
    assert [g["lr"] for g in its.param_groups] == [g["lr"] for g in reversed(optimizer.param_groups)]


def test_two_weights_that_are_one_in_the_model_are_refused(tmp_path: Path) -> None:
    class Untied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = nn.Parameter(torch.ones(11, 8))

    fxsplit.save_checkpoint(tmp_path, Untied(), step=1).wait()
    with pytest.raises(InputError, match=r"'words.weight' and 'head.weight' are one weight in the model, and two in"):
        fxsplit.load_checkpoint(tmp_path, Net())


def test_a_name_in_two_files_is_refused(saved: tuple[Path, dict[str, Any]]) -> None:
    path, _ = saved
    (path / "model-2.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    change(path, files=["model.safetensors", "model-2.safetensors", "training.safetensors"])
    refuse(path, "holds '.*', and so does 'model.safetensors'")


class Keeper(torch.optim.SGD):
    """An optimizer that keeps more than tensors, as custom ones do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight].setdefault("pair", (1, {2: "two"}))
                self.state[weight].setdefault("count", 7)
        return super().step(closure)


def test_values_that_json_does_not_know_come_back_as_they_were(tmp_path: Path) -> None:
    def make(model: nn.Module) -> Optimizer:
        return Keeper(model.parameters(), lr=0.1)

    model, optimizer = build(make=make)
    step(model, optimizer)
    path = fxsplit.save_checkpoint(tmp_path, model, optimizer, step=1).wait()
    assert {"json.blocks.0.bias.count", "typed.blocks.0.bias.pair"} <= load_file(path / "training.safetensors").keys()
    other, its = build(make=make)
    fxsplit.load_checkpoint(path, other, its)
    found = its.state[other.head.bias]
    assert (found["pair"], found["count"]) == ((1, {2: "two"}), 7)


def test_a_file_or_a_folder_of_another_tool_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-12").write_text("notes")
    with pytest.raises(InputError, match="step-12' exists and is not a readable checkpoint"):
        fxsplit.save_checkpoint(tmp_path, nn.Linear(1, 1), step=12)
    assert (tmp_path / "step-12").read_text() == "notes" and len([*tmp_path.iterdir()]) == 1


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build()
    path = fxsplit.save_checkpoint(tmp_path, model, optimizer, step=1).wait()
    load_tensors = checkpoint_storage.load_tensors

    def replace(*arguments: Any) -> None:
        fxsplit.save_checkpoint(tmp_path, build(seed=5)[0], optimizer=None, step=1).wait()
        load_tensors(*arguments)

    monkeypatch.setattr(checkpoint, "load_tensors", replace)
    with pytest.raises(InputError, match=r"step-1' was replaced or removed by another thread or process"):
        fxsplit.load_checkpoint(path, model)
    monkeypatch.undo()
    assert fxsplit.load_checkpoint(path, model).step == 1
