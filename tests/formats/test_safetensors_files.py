"""Checkpoints: read tensor by tensor, interchangeable with the unsplit model's, or refused."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import InputError
from fxsplit.ir.facts.figures import show
from tests.models import FAST, Mlp
from tests.proof.test_too_big import Tied, tokens

OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


def test_checkpoints_go_both_ways_in_the_middle_of_training(tmp_path: Path) -> None:
    """Pipeline to model and model to pipeline, weights as safetensors and optimizer state as torch.save has it."""
    torch.manual_seed(0)
    model, plain = Tied(), Tied()
    x, target = tokens(), torch.randn(4, 6, 20)

    def train(run: Any, optimizer: torch.optim.Optimizer) -> None:
        for a, b in zip(x.chunk(2), target.chunk(2), strict=True):
            optimizer.zero_grad()
            F.mse_loss(run(a), b).backward()
            optimizer.step()

    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain))
    with fxsplit.compile(model, 2, example_inputs=x[:2], passes=FAST, n_microbatches=1) as pipe:
        train(pipe, mine)
        save_model(pipe, str(tmp_path / "pipe.safetensors"))
        torch.save(mine.state_dict(), tmp_path / "pipe.pt")
        plain.load_state_dict({**load_file(tmp_path / "pipe.safetensors"), "head.weight": model.head.weight})
        theirs.load_state_dict(torch.load(tmp_path / "pipe.pt"))
        train(pipe, mine)
        train(plain, theirs)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value)
        train(plain, theirs)
        save_model(plain, str(tmp_path / "plain.safetensors"))
        torch.save(theirs.state_dict(), tmp_path / "plain.pt")
        pipe.load_weights(tmp_path / "plain.safetensors")
        mine.load_state_dict(torch.load(tmp_path / "plain.pt"))
        train(pipe, mine)
        train(plain, theirs)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value)
        assert model.head.weight is model.embed.weight


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    model = Mlp()
    state = model.state_dict()
    before = copy.deepcopy(state)

    def saved(name: str, state: dict[str, Tensor]) -> Path:
        save_file(state, tmp_path / name)
        return tmp_path / name

    first = next(iter(state))
    with fxsplit.compile(model, 2, example_inputs=torch.randn(4, 8), **OPTIONS) as pipe:
        lacking = {k: v for k, v in state.items() if k != first}
        with pytest.raises(InputError, match=rf"lacks 1 of the {len(state)} weights of Mlp, such as '{first}'"):
            pipe.load_weights(saved("lacking.safetensors", lacking))
        with pytest.raises(InputError, match=r"1 tensors that Mlp does not have, such as 'more'.*strict=False"):
            pipe.load_weights(saved("more.safetensors", {**state, "more": torch.zeros(1)}))
        with pytest.raises(InputError, match=rf"'{first}' is torch.float32 \(1, 2\) in shape.safetensors"):
            pipe.load_weights(saved("shape.safetensors", {**state, first: torch.zeros(1, 2)}))
        halved = {k: v.half() for k, v in state.items()}
        with pytest.raises(InputError, match=r"is torch.float16 .* in half.safetensors and torch.float32"):
            pipe.load_weights(saved("half.safetensors", halved))
        for name, value in before.items():
            assert torch.equal(model.state_dict()[name], value)
        changed = {k: v + 1 for k, v in state.items()}
        pipe.load_weights(saved("right.safetensors", {**changed, "more": torch.zeros(1)}), strict=False)
        for name, value in changed.items():
            assert torch.equal(model.state_dict()[name], value)


def test_files_that_are_no_checkpoint(tmp_path: Path) -> None:
    def refused(path: Path, match: str) -> None:
        with pytest.raises(InputError, match=match):
            fxsplit.compile(Mlp(), 2, weights=path)

    refused(tmp_path / "none.safetensors", r"there is no checkpoint .*none\.safetensors")
    refused(tmp_path, r"folder .* holds none: give one")
    (tmp_path / "bad.safetensors").write_bytes(b"\x80\x04no pickle is ever read")
    refused(tmp_path / "bad.safetensors", r"bad\.safetensors' cannot be read as safetensors")
    index = tmp_path / "x.safetensors.index.json"
    index.write_text("[]")
    refused(index, r"is no index of safetensors files")
    index.write_text("[" * 100_000)
    refused(index, r"is no index of safetensors files .*: it is nested too deeply")
    for name in ("../bad.safetensors", "gone.safetensors", "x" * 3000, "a\0b", 5, None, {"a": "b"}):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        refused(index, rf"names {re.escape(show(name))}, which is no file in")
    save_file({"b": torch.zeros(1)}, tmp_path / "held.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(Mlp().state_dict(), "held.safetensors")}))
    with pytest.raises(InputError, match=r"index.json: held.safetensors does not hold 'layers.0.weight'"):
        fxsplit.compile(Mlp(), 2, example_inputs=torch.randn(4, 8), weights=index, **OPTIONS)


def test_each_name_of_a_tied_weight_is_looked_at(tmp_path: Path) -> None:
    """The second name of a weight was read unchecked: an error of the reader's own came out, or torch's."""
    state = {name: value.clone() for name, value in Tied().state_dict().items()}
    other = {"head.weight": state.pop("head.weight")}
    save_file(state, tmp_path / "a.safetensors")
    index = tmp_path / "x.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": dict.fromkeys(state, "a.safetensors") | {"head.weight": "b.safetensors"}})
    )
    with fxsplit.compile(Tied(), 2, example_inputs=tokens(), **OPTIONS) as pipe:
        for held, match in (
            ({"none": torch.zeros(1)}, "does not hold 'head.weight'"),
            (other, "head.weight' is torch.f"),
        ):
            save_file({name: value.half() for name, value in held.items()}, tmp_path / "b.safetensors")
            with pytest.raises(InputError, match=match):
                pipe.load_weights(index)
