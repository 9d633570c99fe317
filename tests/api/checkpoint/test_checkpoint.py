"""Training continues from a checkpoint exactly: in a pipeline on any number of devices, and in the plain model."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import fxsplit
from fxsplit.api.checkpoint import storage as checkpoint_storage
from fxsplit.errors import FileError
from fxsplit.formats.weights import save_safetensors
from fxsplit.formats.weights.checkpoint_folder import NewCheckpoint
from tests.support.checkpoints import Net, X, build, compare, cut, make_adamw, read, save_three_steps, step
from tests.support.programs import run
from tests.support.ranks import ranks


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    return save_three_steps(tmp_path)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_it_loads_on_any_number_of_devices(saved: tuple[Path, dict[str, Any]], n: int) -> None:
    """0 devices means the plain model."""
    path, expected = saved
    model, optimizer = build(seed=7)
    objects = [*model.parameters(), *model.buffers()]
    run = cut(model, n) if n else model
    restored = fxsplit.load_checkpoint(path, run, optimizer)
    assert (restored.step, restored.extra, restored.path) == (3, {"epoch": 1}, path)
    compare(read(model, optimizer), expected)
    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], objects, strict=True))
    step(run, optimizer)


def test_a_checkpoint_of_the_plain_model_loads_in_a_pipeline(tmp_path: Path) -> None:
    model, optimizer = build()
    step(model, optimizer)
    fxsplit.save_checkpoint(tmp_path, model, optimizer, step=1).wait()
    other, its = build(seed=5)
    fxsplit.load_checkpoint(tmp_path, cut(other, 3), its)
    compare(read(other, its), read(model, optimizer))


def test_training_goes_on_bit_for_bit_with_dropout(tmp_path: Path) -> None:
    model, optimizer = build()
    pipe = cut(model, 2)
    calm = []
    for number in range(6):
        if number == 3:
            saving = fxsplit.save_checkpoint(tmp_path, pipe, optimizer, step=number)
        calm.append(step(pipe, optimizer))
    saving.wait()
    other, its = build(seed=9)
    again = fxsplit.compile(
        other, ["cpu"] * 2, example_inputs=X, loss_fn=cross_entropy, n_microbatches=4,
        costs=tmp_path / "step-3" / "costs.json",
    )  # fmt: skip
    assert fxsplit.load_checkpoint(tmp_path, again, its).step == 3
    assert again.plan.stages == pipe.plan.stages
    assert [step(again, its) for _ in range(3)] == calm[3:]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW fused": lambda w: torch.optim.AdamW(w, lr=0.01, fused=True),
    "AdamW amsgrad, a tensor as lr": lambda w: torch.optim.AdamW(w, lr=torch.tensor(0.01), amsgrad=True),
    "SGD": lambda w: torch.optim.SGD(w, lr=0.01, momentum=0.9),
    "SGD without momentum": lambda w: torch.optim.SGD(w, lr=0.01),
    "Adagrad": lambda w: torch.optim.Adagrad(w, lr=0.01),
    "RMSprop": lambda w: torch.optim.RMSprop(w, lr=0.01, centered=True, momentum=0.5),
    "NAdam": lambda w: torch.optim.NAdam(w, lr=0.01),
    "ASGD": lambda w: torch.optim.ASGD(w, lr=0.01),
    "Rprop": lambda w: torch.optim.Rprop(w, lr=0.01),
    "Adafactor": lambda w: torch.optim.Adafactor(w, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_go_on(tmp_path: Path, name: str) -> None:
    def make(model: nn.Module) -> Optimizer:
        return OPTIMIZERS[name](model.parameters())

    model, optimizer = build(make=make)
    for _ in range(2):
        step(model, optimizer)
    fxsplit.save_checkpoint(tmp_path, model, optimizer, step=2).wait()
    other, its = build(seed=3, make=make)
    step(other, its)  # it has state of its own
    fxsplit.load_checkpoint(tmp_path, other, its)
    compare(read(other, its), read(model, optimizer))
    for _ in range(2):
        state = torch.get_rng_state()
        first = step(model, optimizer)
        torch.set_rng_state(state)
        assert step(other, its) == first


def test_files_are_safetensors_by_the_models_names(saved: tuple[Path, dict[str, Any]]) -> None:
    path, expected = saved
    found = load_file(path / "model.safetensors")
    model = Net()
    assert found.keys() == model.state_dict().keys() - {"head.weight"}  # tied, and stored once
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert load_file(path / "training.safetensors").keys() >= {"optimizer.words.weight.exp_avg", "random.cpu"}
    assert {"plan.json", "costs.json", "checkpoint.json"} < {p.name for p in path.iterdir()}
    assert fxsplit.Costs.load(path / "costs.json").rows == 6
    pipe = cut(model, 2)
    pipe.load_weights(path / "model.safetensors")
    assert torch.equal(model.head.weight, expected["head.weight"])


def test_nothing_is_unpickled(saved: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a pickle")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    path, _ = saved
    fxsplit.load_checkpoint(path, *build(seed=2))
    for file in path.iterdir():
        # A pickle of protocol 2 or later starts with these bytes, and torch's own files are zip files.
        assert not file.read_bytes().startswith((b"\x80", b"PK")), file


def test_values_are_those_of_the_call_however_late_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build()
    step(model, optimizer)
    expected, go_on = read(model, optimizer), threading.Event()
    write = save_safetensors.write_tensors

    def write_late(*args: Any) -> None:
        go_on.wait(60)
        write(*args)

    monkeypatch.setattr(checkpoint_storage, "write_tensors", write_late)
    saving = fxsplit.save_checkpoint(tmp_path, model, optimizer, step=1)
    assert not saving.done and fxsplit.latest_checkpoint(tmp_path) is None
    step(model, optimizer)
    go_on.set()
    assert fxsplit.latest_checkpoint(tmp_path) is None or saving.done
    saving.wait()
    other, its = build(seed=4)
    fxsplit.load_checkpoint(tmp_path, other, its)
    compare(read(other, its), expected)


def test_what_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build()
    step(model, optimizer)
    before = fxsplit.save_checkpoint(tmp_path, model, optimizer, step=1).wait()

    def fail(path: Path, *args: Any) -> None:
        if path.name.startswith("training"):
            raise OSError(28, "No space left on device")
        path.write_bytes(b"half")

    monkeypatch.setattr(checkpoint_storage, "write_tensors", fail)
    saving = fxsplit.save_checkpoint(tmp_path, model, optimizer, step=2)
    with pytest.raises(FileError, match=r"cannot write .*step-2.*No space left on device.*make room"):
        saving.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"] and fxsplit.latest_checkpoint(tmp_path) == before
    # A caller that never waited gets the error at the next save.
    fxsplit.save_checkpoint(tmp_path, model, optimizer, step=3)
    with pytest.raises(FileError, match="step-3"):
        fxsplit.save_checkpoint(tmp_path, model, optimizer, step=4)
    monkeypatch.undo()
    assert fxsplit.save_checkpoint(tmp_path, model, optimizer, step=4).wait() == tmp_path / "step-4"


def save_and_die(rank: int, world: int, folder: Path, when: str) -> None:
    """Save one checkpoint, and be killed in the middle of the next."""
    model, optimizer = build()
    step(model, optimizer)
    fxsplit.save_checkpoint(folder, model, optimizer, step=1).wait()

    def die(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(NewCheckpoint if when == "complete" else checkpoint_storage, when, die)
    fxsplit.save_checkpoint(folder, model, optimizer, step=2).wait()


@pytest.mark.parametrize("when", [pytest.param("write_tensors", marks=pytest.mark.long), "complete"])
def test_killed_while_saving_the_one_before_is_the_latest(tmp_path: Path, when: str) -> None:
    assert ranks(1, save_and_die, tmp_path, when, dying=[0]) == [-signal.SIGKILL]
    assert fxsplit.latest_checkpoint(tmp_path) == tmp_path / "step-1"
    assert len([*tmp_path.iterdir()]) == 2  # of the checkpoint that was begun
    model, optimizer = build(seed=6)
    assert fxsplit.load_checkpoint(tmp_path, model, optimizer).step == 1
    fxsplit.save_checkpoint(tmp_path, model, optimizer, step=2).wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-2"]


def test_a_step_that_is_saved_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    model, optimizer = build()
    for _ in range(2):
        step(model, optimizer)
        fxsplit.save_checkpoint(tmp_path, model, optimizer, step=1).wait()
    other, its = build(seed=1)
    fxsplit.load_checkpoint(tmp_path, other, its)
    compare(read(other, its), read(model, optimizer))
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    model, optimizer = build()
    for number in (8, 9, 10, 11):
        fxsplit.save_checkpoint(tmp_path, model, optimizer, step=number, keep=2).wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-11"]
    assert fxsplit.latest_checkpoint(tmp_path) == tmp_path / "step-11"
    assert fxsplit.latest_checkpoint(tmp_path / "nowhere") is None


def test_a_model_without_weights_is_filled(saved: tuple[Path, dict[str, Any]]) -> None:
    path, expected = saved
    with fxsplit.without_weights():
        model = Net()
    pipe = cut(model, 2)
    optimizer = make_adamw(model)
    fxsplit.load_checkpoint(path, pipe, optimizer)
    compare(read(model, optimizer), expected)
    step(pipe, optimizer)


def test_a_process_that_ends_completes_its_checkpoint(tmp_path: Path) -> None:
    """The end of a process must not end the thread that writes."""
    code = (
        "import torch, fxsplit, time\n"
        "from fxsplit.api.checkpoint import storage\n"
        "write = storage.write_tensors\n"
        "storage.write_tensors = lambda *args: (time.sleep(0.5), write(*args))\n"
        f"fxsplit.save_checkpoint({str(tmp_path)!r}, torch.nn.Linear(2, 2), step=5)\n"
    )
    assert run(code).code == 0
    assert fxsplit.latest_checkpoint(tmp_path) == tmp_path / "step-5"


class Kept(nn.Module):
    """A model with state of its own, of another size each time, and a buffer that repeats its numbers in memory."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.layer, self.numbers = nn.Linear(2, 2), numbers
        self.register_buffer("scale", torch.rand(3, 1).expand(3, 4))

    def get_extra_state(self) -> Tensor:
        return torch.arange(self.numbers)

    def set_extra_state(self, state: Tensor) -> None:
        self.numbers = len(state)


def test_what_cannot_be_filled_in_place_comes_back(tmp_path: Path) -> None:
    """A module's own state is loaded, and repeated numbers do not end a load half-way."""
    model, other = nn.Sequential(Kept(3)), nn.Sequential(Kept(5))
    fxsplit.save_checkpoint(tmp_path, model, step=1).wait()
    fxsplit.load_checkpoint(tmp_path, other)
    assert other[0].numbers == 3
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True))
