"""Models that are never in memory as a whole: captured and planned from their shapes, loaded stage by stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from bench import networks as zoo
from bench.networks.transformer import Encoder
from fxsplit.errors import InputError, TraceError
from fxsplit.formats.weights import safetensors_files as weight_files
from fxsplit.ir.facts.capture.example import Example
from tests.support.models import FAST, Mlp

OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


class Tied(nn.Module):
    """An embedding that is also the head, a buffer that checkpoints lack, and Python control flow by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.linspace(1.0, 2.0, 8), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) * self.scale
        h = h + torch.arange(tokens.shape[1], device=tokens.device)[None, :, None] / 10
        h = self.norm(F.gelu(self.mix(h)).transpose(1, 2)).transpose(1, 2)
        result: Tensor = self.head(h)
        return result


class Exported(Tied):
    """The same, with control flow that only torch.export follows."""

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > 3:
            tokens = tokens.clone()
        offset = torch.tensor([0.5, 0.25])
        return super().forward(tokens) + offset.sum()


def tokens(rows: int = 4) -> Tensor:
    return torch.randint(0, 20, (rows, 6))


def sharded(model: nn.Module, folder: Path) -> Path:
    """Save a model as two files with an index; a tied weight has one name, as in Hugging Face's files."""
    held: dict[int, tuple[str, Tensor]] = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        held.setdefault(id(weight), (name, weight.detach()))
    entries = list(held.values())
    index: dict[str, str] = {}
    for number in range(2):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file(dict(entries[number::2]), folder / file)
        index |= {name: file for name, _ in entries[number::2]}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path


def empty(kind: type[nn.Module], **options: Any) -> nn.Module:
    with fxsplit.without_weights():
        return kind(**options)


@pytest.mark.parametrize("kind", [Tied, Exported])
def test_a_model_without_weights_becomes_the_model(kind: type[nn.Module], tmp_path: Path) -> None:
    """Outputs, gradients, buffers, names and identities, in training and evaluation, from an index of files."""
    torch.manual_seed(0)
    wanted = kind()
    model = empty(kind)
    assert all(p.is_meta for p in model.parameters()) and not any(b.is_meta for b in model.buffers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    held = list(model.parameters())
    x, target = tokens(), tokens()

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), target.flatten())

    path = sharded(wanted, tmp_path)
    with fxsplit.compile(model, 2, example_inputs=x, loss_fn=loss_fn, weights=path, **OPTIONS) as pipe:
        assert pipe.front_end == ("symbolic_trace" if kind is Tied else "export")
        assert [*model.state_dict()] == [*wanted.state_dict()]
        assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
        theirs = torch.optim.AdamW(wanted.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            theirs.zero_grad()
            loss = pipe.step(x, target=target)
            expected = sum(loss_fn(wanted(a), b) / 2 for a, b in zip(x.chunk(2), target.chunk(2), strict=True))
            assert isinstance(expected, Tensor)
            expected.backward()
            torch.testing.assert_close(loss, expected.detach())
            for p, q in zip(model.parameters(), wanted.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
            optimizer.step()
            theirs.step()
        for name, value in wanted.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value)
        pipe.eval(), wanted.eval()
        torch.testing.assert_close(pipe(x), wanted(x))
        assert pipe.traced[Example].from_shapes


LARGER = ("resnet18", "unet", "squeezenet1_0", "inception_v3")


@pytest.mark.parametrize("name", ["encoder", *(pytest.param(name, marks=pytest.mark.long) for name in LARGER)])
def test_what_shapes_tell_is_what_values_show(name: str) -> None:
    """Bytes, draws and constraints of every node equal the observed model's, in training and evaluation."""
    torch.manual_seed(0)

    def build() -> nn.Module:
        model = zoo.build(name, **({"layers": 2} if name == "encoder" else {}))
        if name == "inception_v3":  # its auxiliary head needs images of 299 x 299 for a kernel of 5 x 5
            model.AuxLogits.conv1.conv = nn.Conv2d(128, 768, 1, bias=False)  # type: ignore[union-attr]
        return model

    side = {"inception_v3": 107, "unet": 32}.get(name, 64)
    x = torch.randint(0, 1000, (2, 64)) if name == "encoder" else torch.randn(2, 3, side, side)
    with fxsplit.without_weights():
        shapes = build()
    untimed: Any = {"forward_ms": 0.0, "backward_ms": 0.0, "weight_ms": 0.0}
    for mode in (True, False):
        seen = fxsplit.profile(build().train(mode), x, repeats=1)
        told = fxsplit.profile(shapes.train(mode), x, repeats=1)
        for a, b in zip(seen.nodes, told.nodes, strict=True):
            assert replace(a, **untimed) == replace(b, **untimed)
        assert (seen.together, seen.ordered, seen.outputs) == (told.together, told.ordered, told.outputs)
        assert all(n.forward_ms > 0 for n in told.nodes if n.op.startswith("call_module"))


def test_a_plan_needs_no_weights() -> None:
    model = empty(Encoder, width=32, heads=2, layers=4, length=16)
    x = torch.randint(0, 1000, (4, 16))
    with fxsplit.compile(model, 2, example_inputs=x, **OPTIONS) as pipe:
        assert len(pipe.plan.stages) == 2 and pipe.plan.gap == 0.0
        with pytest.raises(InputError, match=r"has no values yet.*load_weights"):
            pipe(x)
        state = Encoder(width=32, heads=2, layers=4, length=16).state_dict()
        pipe.load_state_dict(state, assign=True)
        wanted = Encoder(width=32, heads=2, layers=4, length=16)
        wanted.load_state_dict(state)
        torch.testing.assert_close(pipe(x), wanted(x))


def test_weights_are_read_stage_by_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages load in order, each to its own device; a machine may have too little memory for the whole model."""
    wanted = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    save_file(wanted.state_dict(), tmp_path / "model.safetensors")
    with fxsplit.without_weights():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    total = sum(p.nbytes for p in model.parameters())
    devices = [fxsplit.Device(f"d{i}", torch.device(["cpu", "cpu:0"][i]), memory_bytes=3.0 * total) for i in range(2)]
    read: list[tuple[str, torch.device]] = []
    give = weight_files._give
    name_of = {id(p): name for name, p in model.named_parameters()}

    def noting(weight: Tensor, value: Tensor, device: torch.device, **how: Any) -> None:
        read.append((name_of[id(weight)], device))
        give(weight, value, device, **how)

    monkeypatch.setattr(weight_files, "_give", noting)
    x = torch.randn(4, 64)
    machine = fxsplit.Machine(tuple(devices), (float("inf"),))
    with fxsplit.compile(model, machine, example_inputs=x, weights=tmp_path, **OPTIONS) as pipe:
        assert len(pipe.stages) == 2  # training takes five times the weights, with the optimizer's state
        stages = [[n for n, p in model.named_parameters() if any(p is w for w in s.module.parameters())]
                  for s in pipe.stages.stages]  # fmt: skip
        assert [name for name, _ in read] == [name for stage in stages for name in stage]
        torch.testing.assert_close(pipe(x), wanted(x))


# Refusals


def test_buffers_that_no_checkpoint_holds(tmp_path: Path) -> None:
    """torch.device("meta") leaves buffers without values too, which would be silently wrong."""
    path = sharded(Tied(), tmp_path)
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(InputError, match=r"'scale' is on the meta device.*fxsplit.without_weights\(\)"):
        fxsplit.compile(model, 2, example_inputs=tokens(), weights=path, **OPTIONS)


def test_flow_that_hangs_on_values_names_the_line() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) if self.a.weight.sum() > 0 else x

    with pytest.raises(TraceError, match=r"test_too_big.py:\d+"):
        fxsplit.compile(empty(Branching), 2, example_inputs=torch.randn(4, 4), **OPTIONS)


def test_hooks_wait_for_weights(tmp_path: Path) -> None:
    save_file(Mlp().state_dict(), tmp_path / "mlp.safetensors")
    model = empty(Mlp)
    next(model.parameters()).register_hook(lambda g: g)
    with pytest.raises(InputError, match=r"'layers.0.weight' has gradient hooks and no values yet"):
        fxsplit.compile(model, 2, example_inputs=torch.randn(4, 8), weights=tmp_path, **OPTIONS)


def test_nothing_to_verify_without_weights() -> None:
    x = torch.randn(4, 8)
    pipe = fxsplit.compile(empty(Mlp), 2, example_inputs=x, **OPTIONS)
    with pipe, pytest.raises(InputError, match=r"has no values yet"):
        fxsplit.verify(pipe, x)


# Memory

PEAKS = """
import sys, threading, time, torch, fxsplit
from torch import nn

def anonymous():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon"))

class Peak:
    def __enter__(self):
        self.begin = self.most = anonymous()
        self.over = False
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self
    def watch(self):
        while not self.over:
            self.most = max(self.most, anonymous())
            time.sleep(0.001)
    def __exit__(self, *exception):
        self.over = True
        self.thread.join()
        self.grown = self.most - self.begin

torch.set_num_threads(1)
width, layers = 1024, 48
x = torch.randn(8, 1024)
with fxsplit.without_weights():
    small = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
with fxsplit.compile(small, 2, example_inputs=torch.randn(4, 64)):
    pass  # what is imported and started on first use
with Peak() as building:
    with fxsplit.without_weights():
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
with Peak() as planning:
    pipe = fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2)
with Peak() as loading:
    pipe.load_weights(sys.argv[1])
with torch.no_grad():
    assert pipe(x).shape == (8, 1024)
print(sum(p.nbytes for p in model.parameters()), building.grown, planning.grown, loading.grown)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peaks of memory from Linux's /proc")
def test_peak_of_memory(tmp_path: Path) -> None:
    """Building and planning take the memory of a few operators; loading takes the weights and a few tensors more."""
    layers, width = 48, 1024
    one = {"weight": torch.randn(width, width), "bias": torch.randn(width)}
    index: dict[str, str] = {}
    for number in range(4):
        held = {f"{i}.{name}": value.clone() for i in range(number, layers, 4) for name, value in one.items()}
        save_file(held, tmp_path / f"{number}.safetensors")
        index |= dict.fromkeys(held, f"{number}.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    # malloc then gives large blocks back at once. By default it keeps a varying number of them after the first.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run([sys.executable, "-c", PEAKS, str(path)], check=True, capture_output=True, text=True, env=env)
    total, building, planning, loading = (int(n) for n in done.stdout.split())
    operator = total / layers
    assert total > 190e6
    assert building < 4 * operator
    assert planning < 6 * operator  # its weights, their gradients, and their copies
    assert loading < total + 2 * operator


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_peak_of_device_memory(tmp_path: Path) -> None:
    """Each GPU never holds more than the weights of its own stage and one tensor."""
    layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))
    save_file(layers.state_dict(), tmp_path / "model.safetensors")
    with fxsplit.without_weights():
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))
    x = torch.randn(8, 1024)
    with fxsplit.compile(model, ["cuda:0", "cuda:1"], example_inputs=x, n_microbatches=2) as pipe:
        for i in range(2):
            torch.cuda.reset_peak_memory_stats(i)
        pipe.load_weights(tmp_path)
        for i, stage in enumerate(pipe.stages.stages):
            own = sum(p.nbytes for p in stage.module.parameters())
            assert torch.cuda.max_memory_allocated(i) < own + 8 * 1024 * 1024
        torch.testing.assert_close(pipe(x), layers(x), rtol=1e-4, atol=1e-5)
