"""Default generators: which ones a call may draw from, and that all of them are read and kept."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import numpy
import pytest
import torch
from torch import Generator, Tensor, nn
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.nn import functional as F

import fxsplit
from fxsplit.torch_internals.fx.interpret import preserve
from fxsplit.torch_internals.random.generators import (
    CPU,
    find_generators,
    find_place,
    keep_generators,
    keep_torch_generators,
    list_places,
    read_generators,
    read_python_generators,
    take_generators,
)
from fxsplit.torch_internals.random.seeded_calls import SeededCall, isolate_draws, notice_draws, take_turn
from tests.support.accelerator import use_accelerator
from tests.support.models import FAST

FIRST, SECOND = ("cuda", 0), ("cuda", 1)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> tuple[Generator, Generator]:
    """The generators of two GPUs that torch seems to have."""
    made = Generator(), Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", made)
    for name, value in {"is_initialized": True, "is_available": True, "current_device": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    # Builds of torch with CUDA initialise a GPU for the first fake tensor on one.
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None)
    return made


def find(call: Any, *args: Any, here: tuple[str, ...] = (), **kwargs: Any) -> list[tuple[str, int]]:
    return [place for place, _ in find_generators(call, args, kwargs, [torch.device(name) for name in here])]


def test_generators_are_read_and_kept() -> None:
    before, python = read_generators(), read_python_generators()
    assert read_generators() == before and read_python_generators() == python
    with keep_generators():
        torch.rand(1)
        assert read_generators() != before and read_python_generators() == python
        random.random()
        assert read_python_generators() != python
        between = read_python_generators()
        numpy.random.rand()
        assert read_python_generators() != between
    assert read_generators() == before and read_python_generators() == python


@pytest.mark.usefixtures("gpus")
def test_a_call_of_torch_draws_on_the_device_it_names() -> None:
    """`torch.rand(n, device=x.device)` was taken for a draw on the CPU: a GPU's masks were other ones in each run."""
    named: list[Any] = [torch.device("cuda:1"), "cuda:1", torch.device("cuda")]
    assert [find(torch.rand, 3, device=device) for device in named] == [[SECOND]] * 3
    assert find(torch.rand, 3, device="cpu", here=("cuda:0",)) == [CPU]
    assert find(torch.rand, 3, here=("cuda:0", "cpu")) == [CPU, FIRST]
    assert find(torch.rand, 3) == [CPU] == find(torch.rand, 3, device="no device")
    with FakeTensorMode():
        x = torch.empty(2, device="cuda:1")
    for call in (F.dropout, torch.bernoulli, "bernoulli", nn.LSTM(2, 2), torch.ops.aten.bernoulli.default):
        assert find(call, x, here=("cuda:0",)) == [SECOND]
    assert find(torch.rand_like, x, device="cpu", here=("cuda:0",)) == [CPU, FIRST, SECOND]


@pytest.mark.usefixtures("gpus")
def test_code_that_is_not_torchs_own_may_draw_anywhere() -> None:
    hooked, own = nn.Dropout(), nn.Sequential(nn.Linear(2, 2), type("Own", (nn.Dropout,), {})())
    hooked.register_forward_hook(lambda *_: None)
    for call in (hooked, own, lambda device: None):
        assert find(call, device="cuda:0", here=("cuda:1",)) == [CPU, FIRST, SECOND]
        assert find(call, here=("cuda:1",)) == [CPU, SECOND]
    assert find(own, {"of": [torch.device("cuda:0")]}) == [CPU, FIRST]


def test_a_device_without_a_generator_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_place(torch.device("meta")) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_place(torch.device("cuda:0")) is None and list_places([torch.device("cuda:0")]) == [CPU]


def test_an_accelerator_is_initialised_for_a_draw_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its generator would be made by the call itself, and draw from a state that nobody has set."""
    begun: list[int] = []
    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(),))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(begun))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: begun.append(1))
    assert list_places() == [CPU] and not begun
    assert find(torch.rand, 3, device="cuda:0") == [FIRST] and begun


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.Dropout()])
def test_every_generator_is_as_before_a_model_was_observed(
    gpus: tuple[Generator, Generator], module: nn.Module
) -> None:
    """Only generators of GPUs with buffers were restored, so a transformer's dropout moved the caller's generator."""
    before = read_generators()
    for block in (preserve(module), keep_torch_generators(), keep_generators()):
        with block:
            for generator in (torch.default_generator, *gpus):
                torch.rand(1, generator=generator)
            assert not set(read_generators()) & set(before)
        assert read_generators() == before


def test_a_device_that_is_measured_on_first_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    generator = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(begun))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: begun.append(1))
    before = generator.get_state()
    with preserve(nn.Linear(2, 2), [torch.device("cuda:0")]):
        torch.rand(1, generator=generator)
    assert torch.equal(generator.get_state(), before)


def test_a_gpu_is_seeded_for_a_draw_and_left_as_it_was(gpus: tuple[Generator, Generator]) -> None:
    def noise(n: int, device: torch.device) -> Tensor:
        return torch.rand(n, generator=gpus[device.index or 0]) + torch.rand(n)

    before = read_generators()
    wrapped, found = SeededCall("node", noise), []
    for device in ("cuda:0", "cuda:1", "cuda:1"):
        with take_turn(1, 0):
            found.append(wrapped(4, device=torch.device(device)))
    # The same numbers on each GPU, so that they do not depend on a stage's device.
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
    assert read_generators() == before


def test_a_draw_on_a_gpu_is_noticed(gpus: tuple[Generator, Generator]) -> None:
    with isolate_draws(1, 0, "loss", (), devices=[torch.device("cuda:1")]) as drew:
        torch.rand(1, generator=gpus[1])
    with notice_draws() as moved:
        torch.rand(1, generator=gpus[1])
    assert drew() and moved()


@pytest.mark.usefixtures("gpus")
def test_draws_on_two_devices_do_not_wait_for_each_other() -> None:
    """One lock for all generators let one worker at a time run a layer that drops."""
    made = []
    for device in ("cuda:0", "cuda:1"):
        with FakeTensorMode():  # one for each thread
            made.append(torch.empty(2, device=device))
    here, there = made

    def draw(x: Tensor, done: threading.Event) -> None:
        with take_turn(1, 0):
            SeededCall("node", "sin")(x)
        done.set()

    beside, behind = threading.Event(), threading.Event()
    threads = [threading.Thread(target=draw, args=pair) for pair in ((there, beside), (here, behind))]
    with take_generators([FIRST]):
        for thread in threads:
            thread.start()
        assert beside.wait(60.0) and not behind.wait(0.1)
    for thread in threads:
        thread.join()
    assert behind.is_set()


class Drops(nn.Module):
    """Draws for a tensor, on the device of one, and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.a(x)))
        h = h * torch.rand(h.shape[0], 1, device=x.device)
        out: Tensor = self.c(F.dropout(torch.relu(self.b(h)), 0.3, self.training))
        return out


def test_draws_on_accelerators_do_not_depend_on_cut_device_or_recomputation() -> None:
    """Draws without a tensor argument differed between runs, and between a forward and its recomputation."""
    torch.manual_seed(0)
    base, x = Drops(), torch.randn(16, 8)
    found = []
    for devices, again in (("01", "never"), ("01", "always"), ("0000", "always"), ("10", "never")):
        places = [f"toy:{number}" for number in devices]
        with use_accelerator() as record:
            model, given = copy.deepcopy(base).to(places[0]), x.to(places[0])
            options: Any = {"example_inputs": given, "n_microbatches": 4, "recompute": again, "passes": FAST}
            with fxsplit.compile(model, places, **options) as pipe:
                torch.manual_seed(5)
                before, drawn = read_generators(), record.draws.copy()
                pipe(given).square().sum().backward()
                assert read_generators()[1:] == before[1:]
                assert record.draws.total() > drawn.total()
            record.check()
            found.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    for gradients in found[1:]:
        torch.testing.assert_close(gradients, found[0], rtol=0.0, atol=0.0)
