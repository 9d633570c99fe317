"""Checkpoints that were written before kinds and types were noted still load; these are written here byte by byte."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.errors import InputError


def write_tensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """Write a safetensors file as the format says: the length of the header, the header, the numbers."""
    header, body = {}, b""
    for name, (dtype, shape, numbers) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(numbers)]}
        body += numbers
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def write_older(folder: Path, note: bytes = b'{"a": [1, 2]}', buffer: Any = None, **changes: Any) -> Path:
    """Write step 7 of Linear(2, 1) with SGD of one group, in version 1 of the format."""
    path = folder / "step-7"
    path.mkdir(parents=True)
    write_tensors(
        path / "model.safetensors", {"weight": ("F32", [1, 2], floats(1.5, -2.0)), "bias": ("F32", [1], floats(0.25))}
    )
    write_tensors(
        path / "training.safetensors",
        {
            "optimizer.weight.momentum_buffer": buffer or ("F32", [1, 2], floats(3.0, 4.0)),
            "optimizer.bias.momentum_buffer": ("F32", [1], floats(5.0)),
            "json.bias.note": ("U8", [len(note)], note),
            "random.cpu": ("U8", [5056], torch.Generator().manual_seed(9).get_state().numpy().tobytes()),
        },
    )
    options = {
        "lr": 0.125, "momentum": 0.9, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False,
        "foreach": None, "differentiable": False, "fused": None, "pair": [1, 2],
    }  # fmt: skip
    manifest = {
        "format": "fxsplit checkpoint", "version": 1, "step": 7,
        "files": ["model.safetensors", "training.safetensors"], "tied": {}, "optimizer": "SGD",
        "groups": [{"parameters": ["weight", "bias"], "options": options}],
        "extra": {"epoch": 3, "notes": [[["epoch"], "tuple"]], "1": "a"}, "gradient_hook": None,
        "versions": {"torch": torch.__version__, "python": "3.11.7"},
    }  # fmt: skip
    (path / "checkpoint.json").write_text(json.dumps(manifest | changes, indent=1) + "\n")
    return path


def build() -> tuple[nn.Linear, torch.optim.SGD]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD([{"params": model.parameters(), "pair": (0, 0)}], lr=1.0, momentum=0.5)


def test_an_older_checkpoint_loads(tmp_path: Path) -> None:
    path = write_older(tmp_path)
    model, optimizer = build()
    restored = fxsplit.load_checkpoint(tmp_path, model, optimizer)
    assert (restored.step, restored.path) == (7, path)
    assert restored.extra == {"epoch": 3, "notes": [[["epoch"], "tuple"]], "1": "a"}
    assert model.weight.tolist() == [[1.5, -2.0]] and model.bias.tolist() == [0.25]
    assert optimizer.state[model.weight]["momentum_buffer"].tolist() == [[3.0, 4.0]]
    assert optimizer.state[model.bias]["momentum_buffer"].tolist() == [5.0]
    assert optimizer.state[model.bias]["note"] == {"a": [1, 2]}
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["pair"]) == (0.125, 0.9, (1, 2))
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(9).get_state())
    assert fxsplit.latest_checkpoint(tmp_path) == path
    # It counts towards keep=.
    fxsplit.save_checkpoint(tmp_path, model, optimizer, step=8, keep=2).wait()
    fxsplit.save_checkpoint(tmp_path, model, optimizer, step=9, keep=2).wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-8", "step-9"]


def test_an_older_checkpoint_loads_in_a_pipeline(tmp_path: Path) -> None:
    write_older(tmp_path)
    model, optimizer = build()
    pipe = fxsplit.compile(model, ["cpu"], example_inputs=torch.ones(4, 2))
    assert fxsplit.load_checkpoint(tmp_path, pipe, optimizer).step == 7 and model.bias.tolist() == [0.25]


def test_a_value_of_an_older_checkpoint_that_is_no_json_is_refused(tmp_path: Path) -> None:
    write_older(tmp_path, note=b'{"a": [1')
    model, optimizer = build()
    before = model.weight.tolist()
    with pytest.raises(InputError, match=r"'json.bias.note' in .*step-7' cannot be read as JSON"):
        fxsplit.load_checkpoint(tmp_path, model, optimizer)
    assert model.weight.tolist() == before and not optimizer.state


@pytest.mark.parametrize("kind", [("F32", [2], floats(3.0, 4.0)), ("I32", [1, 2], b"12345678"), ("F32", [], b"1234")])
def test_state_of_an_older_checkpoint_is_like_its_parameter(tmp_path: Path, kind: Any) -> None:
    write_older(tmp_path, buffer=kind)
    model, optimizer = build()
    with pytest.raises(InputError, match=r"'optimizer.weight.momentum_buffer' is .* and its parameter is F32 \[1, 2\]"):
        fxsplit.load_checkpoint(tmp_path, model, optimizer)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"parameters": ["weight"], "options": {"lr": 0.1}}], "'bias' was in no group of the optimizer"),
        ([{"parameters": ["weight", "bias"], "options": {"lr": "fast"}}], "has lr=1.0, and .* holds lr='fast'"),
        ([{"parameters": ["weight"], "options": {}}, {"parameters": ["bias"], "options": {}}], "had 2 groups"),
    ],
)
def test_groups_of_older_checkpoints_are_compared_too(tmp_path: Path, groups: Any, message: str) -> None:
    write_older(tmp_path, groups=groups)
    model, optimizer = build()
    with pytest.raises(InputError, match=message):
        fxsplit.load_checkpoint(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 1.0
