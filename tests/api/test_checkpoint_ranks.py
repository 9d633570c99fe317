"""Checkpoints of pipelines over ranks: each rank writes its own, and any number of ranks, or of devices, reads them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.nn.functional import cross_entropy

import fxsplit
from fxsplit.api import checkpoint_storage
from fxsplit.errors import FileError, InputError, RanksDiffer
from fxsplit.torch_internals.away import is_away
from tests.checkpoints import X, build, cut, read, save_three_steps, step
from tests.models import FAST
from tests.ranks import ranks

OPTIONS: dict[str, Any] = {
    "passes": FAST,
    "n_microbatches": 4,
    "loss_fn": cross_entropy,
    "example_inputs": X,
}


def hash_state(found: dict[str, Any]) -> dict[str, str]:
    """Return a digest of every tensor of a model and of its optimizer, by name."""
    return {
        name: hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()[:16]
        for name, value in found.items()
        if isinstance(value, torch.Tensor) and not is_away(value)
    }


def load_and_hash(rank: int, n: int, path: Path) -> dict[str, str]:
    model, optimizer = build(seed=11)
    pipe = fxsplit.compile(model, "world" if n > 1 else ["cpu"] * 2, **OPTIONS)
    assert fxsplit.load_checkpoint(path, pipe, optimizer).step == 3
    found = hash_state(read(model, optimizer))
    step(pipe, optimizer)
    pipe.close()
    return found


def train_and_save(rank: int, n: int, folder: Path) -> dict[str, str]:
    model, optimizer = build()
    pipe = fxsplit.compile(model, "world", **OPTIONS)
    for _ in range(3):
        step(pipe, optimizer)
    saving = fxsplit.save_checkpoint(folder, pipe, optimizer, step=3, extra={"epoch": 1})
    found = hash_state(read(model, optimizer))
    step(pipe, optimizer)  # while it is written
    assert saving.wait() == folder / "step-3" and fxsplit.latest_checkpoint(folder) == folder / "step-3"
    pipe.close()
    return found


def merge(parts: list[dict[str, str]]) -> dict[str, str]:
    """Return the digests of all ranks, which agree where they have the same."""
    whole: dict[str, str] = {}
    for part in parts:
        assert all(whole.get(name, digest) == digest for name, digest in part.items())
        whole |= part
    return whole


@pytest.mark.parametrize("n", [2, 4])
def test_what_ranks_save_loads_on_any_number(tmp_path: Path, n: int) -> None:
    saved = merge(ranks(n, train_and_save, tmp_path))
    for other in (1, 2, 3):
        assert merge(ranks(other, load_and_hash, tmp_path)) == saved, f"on {other} ranks"
    model, optimizer = build(seed=12)
    assert fxsplit.load_checkpoint(tmp_path, model, optimizer).extra == {"epoch": 1}
    assert hash_state(read(model, optimizer)) == saved
    # A tensor lies in the file of the rank that has it, under the model's name.
    path = tmp_path / "step-3"
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == model.state_dict().keys() - {"head.weight"} and len(set(index.values())) > 1
    for name, file in index.items():
        with safe_open(path / file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), model.state_dict()[name])
    # The index is one that a pipeline, or Hugging Face, reads.
    other_model, _ = build(seed=3)
    cut(other_model, 2).load_weights(path)
    assert torch.equal(other_model.words.weight, model.words.weight)


def test_what_threads_save_loads_over_ranks(tmp_path: Path) -> None:
    path, expected = save_three_steps(tmp_path)
    for n in (2, 3):
        assert merge(ranks(n, load_and_hash, path)) == hash_state(expected)


def go_on(rank: int, n: int, folder: Path) -> list[list[float]]:
    """Train, save in the middle, and go on from there with another model."""
    model, optimizer = build()
    pipe = fxsplit.compile(model, "world", **OPTIONS)
    calm = []
    for number in range(5):
        if number == 2:
            fxsplit.save_checkpoint(folder, pipe, optimizer, step=2)
        calm.append(step(pipe, optimizer))
    other, its = build(seed=6)
    torch.manual_seed(rank)
    options = {**OPTIONS, "passes": fxsplit.DEFAULT, "costs": folder / "step-2" / "costs.json"}
    fxsplit.save_checkpoint(folder, pipe, step=1).wait()  # the one before is complete then
    again = fxsplit.compile(other, "world", **options)
    assert fxsplit.load_checkpoint(folder, again, its).step == 2
    after = [step(again, its) for _ in range(3)]
    assert [s.nodes for s in again.plan.stages] == [s.nodes for s in pipe.plan.stages]
    return [calm[2:], after]


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    found = ranks(2, go_on, tmp_path)
    assert found[0][0] == found[0][1] == found[1][1]


def die_while_saving(rank: int, n: int, folder: Path) -> str:
    model, optimizer = build()
    pipe = fxsplit.compile(model, "world", **OPTIONS)
    step(pipe, optimizer)
    fxsplit.save_checkpoint(folder, pipe, optimizer, step=1).wait()
    if rank == 1:
        checkpoint_storage.write_tensors = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[attr-defined]
    try:
        fxsplit.save_checkpoint(folder, pipe, optimizer, step=2).wait()
    except Exception as error:
        return type(error).__name__
    return "saved"


def test_a_rank_that_is_killed_while_saving_leaves_the_one_before(tmp_path: Path) -> None:
    found = ranks(2, die_while_saving, tmp_path, dying=[1])
    assert found[0] != "saved" and found[1] == -signal.SIGKILL
    assert fxsplit.latest_checkpoint(tmp_path) == tmp_path / "step-1"
    merge(ranks(2, load_step_1, tmp_path))


def load_step_1(rank: int, n: int, folder: Path) -> dict[str, str]:
    model, optimizer = build(seed=2)
    pipe = fxsplit.compile(model, "world", **OPTIONS)
    assert fxsplit.load_checkpoint(folder, pipe, optimizer).step == 1
    pipe.close()
    return {}


def fail(rank: int, n: int, folder: Path) -> list[str]:
    """Fail to write on one rank, and to agree on what is saved and loaded."""
    model, optimizer = build()
    pipe = fxsplit.compile(model, "world", **OPTIONS)
    step(pipe, optimizer)
    write = checkpoint_storage.write_tensors  # type: ignore[attr-defined]

    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    if rank == 1:
        checkpoint_storage.write_tensors = refuse  # type: ignore[attr-defined, assignment]
    texts = []
    with pytest.raises(FileError) as caught:
        fxsplit.save_checkpoint(folder, pipe, optimizer, step=1).wait()
    texts.append(str(caught.value))
    checkpoint_storage.write_tensors = write  # type: ignore[attr-defined]
    with pytest.raises(RanksDiffer) as differ:
        fxsplit.save_checkpoint(folder, pipe, optimizer, step=2 + rank)
    texts.append(str(differ.value))
    for number in (4, 5):
        fxsplit.save_checkpoint(folder, pipe, optimizer, step=number).wait()
    with pytest.raises(RanksDiffer) as differ:
        fxsplit.load_checkpoint(folder / f"step-{4 + rank}", pipe, optimizer)
    texts.append(str(differ.value))
    with pytest.raises(InputError, match="there is no complete checkpoint"):
        fxsplit.load_checkpoint(folder / "nowhere", pipe)
    assert fxsplit.load_checkpoint(folder, pipe, optimizer).step == 5
    step(pipe, optimizer)
    pipe.close()
    return texts


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    first, second = ranks(2, fail, tmp_path)
    assert first == second and "No space left on device" in first[0]
    assert "save_checkpoint(step=3)" in first[1] and "save_checkpoint(step=2)" in first[1]
    assert "loads step-5" in first[2] and "loads step-4" in first[2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-4", "step-5"]
