"""Checkpoints: read tensor by tensor, interchangeable with the unsplit model's, or refused."""

from __future__ import annotations

import copy
import json
import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fxsplit
from fxsplit.errors import InputError
from fxsplit.formats.weights.checkpoint_names import Extra
from fxsplit.formats.weights.safetensors_files import WeightFiles
from fxsplit.system.figures import show
from tests.proof.test_replicas import chain
from tests.proof.test_too_big import Tied, sharded, tokens
from tests.support.models import FAST, Mlp
from tests.support.terminals import Terminal

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
        dtypes = r"'layers.0.weight' is torch.float16 .* in half.safetensors and torch.float32 .*dtype=torch.float32 "
        with pytest.raises(InputError, match=dtypes):
            pipe.load_weights(saved("half.safetensors", halved))
        # Files of the model's own dtype too: no tensor would get the requested dtype.
        saved("same.safetensors", state)
        for file in ("half.safetensors", "same.safetensors"):
            match = r"dtype=torch.float64: the weights of Mlp are torch.float32, .* give dtype=torch.float32, or build"
            with pytest.raises(InputError, match=match):
                pipe.load_weights(tmp_path / file, dtype=torch.float64)
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


# Other dtypes


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_a_checkpoint_of_another_dtype_is_converted(stored: torch.dtype, empty: bool, tmp_path: Path) -> None:
    """Weights and buffers of the model's dtype are converted; integers, and tensors of the model's own dtype, stay."""
    torch.manual_seed(0)
    wanted = Tied()
    state = {n: v.to(stored) if v.is_floating_point() else v for n, v in wanted.state_dict().items()}
    state["mix.bias"] = wanted.mix.bias.detach().clone()  # a checkpoint may hold several dtypes
    state.pop("head.weight")
    save_file(state, tmp_path / "model.safetensors")
    if empty:
        with fxsplit.without_weights():
            model = Tied()
    else:
        model = Tied()
    held = list(model.parameters())
    x = tokens()
    with fxsplit.compile(model, 2, example_inputs=x, weights=tmp_path, dtype=torch.float32, **OPTIONS) as pipe:
        assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
        for name, value in state.items():
            assert torch.equal(model.state_dict()[name], value.to(wanted.state_dict()[name].dtype)), name
        assert model.state_dict()["norm.num_batches_tracked"].dtype == torch.int64
        wanted.load_state_dict(state | {"head.weight": state["embed.weight"]})
        torch.testing.assert_close(pipe.eval()(x), wanted.eval()(x))
        model.bfloat16()
        pipe.load_weights(tmp_path, dtype=torch.bfloat16)
        assert torch.equal(model.mix.weight, state["mix.weight"].bfloat16())


@pytest.mark.parametrize(
    ("stored", "own"),
    [(torch.int32, torch.float32), (torch.float32, torch.int64), (torch.float8_e4m3fn, torch.float32),
     (torch.bool, torch.float32), (torch.float32, torch.complex64)],
)  # fmt: skip
def test_what_is_no_conversion_of_a_weight(stored: torch.dtype, own: torch.dtype, tmp_path: Path) -> None:
    """Numbers of one byte belong to scales, which a conversion would leave out."""

    class Model(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("own", torch.zeros(3, dtype=own))

    model = Model()
    save_file({**model.state_dict(), "own": torch.ones(3).to(stored)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=rf"'own' is {stored} .* and {own} .* in the model, which no dtype= converts"):
        WeightFiles(tmp_path, torch.float32).load(model, [], Extra.REFUSE)


@pytest.mark.parametrize("odd", ["float32", torch.int32, torch.bool, torch.float8_e5m2, torch.complex64, 32])
def test_what_is_no_dtype_of_weights(odd: Any, tmp_path: Path) -> None:
    save_file(Mlp().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="give the floating-point dtype of the model's weights"):
        fxsplit.compile(Mlp(), 2, weights=tmp_path, dtype=odd)
    with pytest.raises(InputError, match=r"for the checkpoint that weights= names"):
        fxsplit.compile(Mlp(), 2, dtype=torch.float32)


# Reading, and the memory for it


class Meter(TorchDispatchMode):
    """Counts the bytes of live tensors that operators make in the block, including tensors read from files."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: dict[int, int] = {}
        self.most = 0
        self.reads: Counter[str] = Counter()

    def note(self, key: int, held: Any, size: int) -> None:
        if key not in self.bytes:
            self.bytes[key] = size
            weakref.finalize(held, self.bytes.pop, key, None)
        self.most = max(self.most, sum(self.bytes.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.is_meta:
            storage = result.untyped_storage()
            self.note(storage._cdata, storage, storage.nbytes())
        return result


@contextmanager
def metered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meter]:
    """Yield a meter of all that WeightFiles loads in the block."""
    meter, read, load = Meter(), WeightFiles._read, WeightFiles.load

    def noting(files: WeightFiles, handles: Any, name: str) -> Tensor:
        meter.reads[name] += 1
        return read(files, handles, name)

    def measured(files: WeightFiles, *args: Any, **kwargs: Any) -> None:
        with meter:
            load(files, *args, **kwargs)

    monkeypatch.setattr(WeightFiles, "_read", noting)
    monkeypatch.setattr(WeightFiles, "load", measured)
    yield meter


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "tied", "replicated"])
def test_a_tensor_is_read_once(kind: str, stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a weight of several stages, or of stages on several devices; in memory is one tensor besides the weights."""

    def build() -> nn.Module:
        if kind == "tied":
            return Tied()
        return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))

    wanted = build()
    sharded(wanted.to(stored), tmp_path)
    with fxsplit.without_weights():
        model = build()
    x = tokens(8) if kind == "tied" else torch.randn(8, 32)
    replicated = {"schedule": "GPipe", "passes": chain([2, 1])}
    options: Any = {**OPTIONS, "n_microbatches": 4} | (replicated if kind == "replicated" else {})
    devices = ["cpu"] * (3 if kind == "replicated" else 2)
    with (
        metered(monkeypatch) as meter,
        fxsplit.compile(model, devices, example_inputs=x, weights=tmp_path, dtype=torch.float32, **options) as pipe,
    ):
        weights = {id(w): w for w in model.state_dict(keep_vars=True).values()}
        assert len(meter.reads) == len(weights) and set(meter.reads.values()) == {1}
        missing = weights.keys() - {id(p) for p in model.parameters()}  # buffers had memory before
        own = sum(w.nbytes for key, w in weights.items() if key not in missing)
        assert own <= meter.most <= own + max(w.nbytes for w in weights.values())
        wanted.float()
        if kind == "tied":
            wanted.scale = model.scale  # in no checkpoint
        torch.testing.assert_close(pipe.eval()(x), wanted.eval()(x))


@pytest.mark.parametrize("empty", [True, False])
def test_a_tied_weight_that_is_stored_twice_is_read_once(
    empty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two once, since they may differ, which is refused before anything is loaded; one was read twice."""
    torch.manual_seed(0)
    state = {name: value.clone() for name, value in Tied().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    with fxsplit.without_weights() if empty else nullcontext():
        model = Tied()
    with metered(monkeypatch) as meter:
        WeightFiles(tmp_path).load(model, [(model.mix.weight, torch.device("cpu"))], Extra.REFUSE)
    assert meter.reads.keys() == state.keys() and set(meter.reads.values()) == {1}
    assert model.head.weight is model.embed.weight
    own = sum(p.nbytes for p in model.parameters()) if empty else 0
    assert meter.most <= own + max(value.nbytes for value in state.values()) * (1 if empty else 3)
    for name, value in state.items():
        assert torch.equal(model.state_dict()[name], value), name
    state["head.weight"] += 1
    save_file(state, tmp_path / "model.safetensors")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match=r"'embed.weight' and 'head.weight' are one weight .* different values"):
        WeightFiles(tmp_path).load(model, [], Extra.REFUSE)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_loading_shows_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("fxsplit.system.progress_bar.PATIENCE_S", 0.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    model = Mlp()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    WeightFiles(tmp_path).load(model, [], Extra.REFUSE)
    assert "loading weights" in terminal.getvalue()
