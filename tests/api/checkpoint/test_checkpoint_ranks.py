"""Checkpoints of pipelines over ranks: each rank writes its own weights, and any number of ranks reads them."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

import fxsplit
from fxsplit.api.checkpoint import storage as checkpoint_storage
from fxsplit.errors import ElsewhereError, FileError, InputError, RanksDiffer
from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from tests.support.checkpoints import X, build, cut, read, save_three_steps, step
from tests.support.models import FAST
from tests.support.ranks import ranks

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
        if isinstance(value, torch.Tensor) and not is_remote(value)
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
    """Return the digests of all ranks. Ranks that have the same tensor must agree."""
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
    # Each tensor is in the file of the rank that has it, under its name in the model.
    path = tmp_path / "step-3"
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == model.state_dict().keys() - {"head.weight"} and len(set(index.values())) > 1
    for name, file in index.items():
        with safe_open(path / file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), model.state_dict()[name])
    # A pipeline, or Hugging Face, can read this index.
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
    """Fail to write on one rank, and to agree on a save and a load."""
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


def save_parts(rank: int, n: int, folder: Path) -> list[str]:
    """Save objects, other than the pipeline, that hold weights of other ranks; on all ranks, or on one."""
    model, optimizer = build()
    pipe = fxsplit.compile(model, "world", **OPTIONS)
    step(pipe, optimizer)
    holders = {
        "the model": model,
        "an average": AveragedModel(model),
        "an average of the pipeline": AveragedModel(pipe.model),
        "a part": nn.ModuleList([model.words, model.blocks, model.head]),
        "a dict": nn.ModuleDict({"net": model}),
        "a pipeline in a module": nn.ModuleDict({"net": pipe}),
        "a list of weights": nn.ParameterList(model.parameters()),
    }
    found = []
    for name, holder in holders.items():
        for its in (None, optimizer) if name == "the model" else (None,):
            with pytest.raises(ElsewhereError) as caught:
                fxsplit.save_checkpoint(folder / name, holder, its, step=1)
            found.append(str(caught.value))
    fxsplit.save_checkpoint(folder, pipe, optimizer, step=2).wait()
    if rank == 0:
        with pytest.raises(ElsewhereError, match="load into the pipeline of the model, on all ranks"):
            fxsplit.load_checkpoint(folder, model, optimizer)
    # A rank that has all weights of a module can save it.
    kept = next(part for part in (model.words, model.blocks[4]) if not any(map(is_remote, part.parameters())))
    path = fxsplit.save_checkpoint(folder / str(rank), kept, step=1).wait()
    assert fxsplit.load_checkpoint(path, kept).step == 1
    pipe.close()
    return found


def test_what_has_weights_of_other_ranks_is_refused_by_name(tmp_path: Path) -> None:
    for rank, texts in enumerate(ranks(2, save_parts, tmp_path)):
        assert len(texts) == 8
        for text in texts:
            assert f"is on rank {1 - rank}, and this rank cannot save a" in text and "save the pipeline" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "step-2"]


class Wrapped(nn.Module):
    """A wrapper that holds a module, as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def save_by_others(rank: int, n: int, folder: Path) -> list[str]:
    """Save the model with functions of torch and safetensors, which do not know about ranks; return their errors."""
    model, optimizer = build()
    pipe = fxsplit.compile(model, "world", **OPTIONS)
    step(pipe, optimizer)
    average = AveragedModel(model)
    average.update_parameters(model)
    file = folder / f"{rank}.safetensors"
    found = []
    for save in (
        lambda: torch.save(Wrapped(model).state_dict(), file),
        lambda: torch.save(copy.deepcopy(model), file),
        lambda: torch.save(copy.deepcopy(model.state_dict()), file),
        lambda: torch.save(average.state_dict(), file),
        lambda: save_file({k: v.clone() for k, v in model.state_dict().items()}, file),
        lambda: save_model(Wrapped(model), str(file)),
        lambda: save_file(copy.deepcopy(average).module.state_dict(), file),
        lambda: build(seed=3)[0].load_state_dict(model.state_dict()),
        lambda: save_by_torch(model.state_dict(), checkpoint_id=folder / "parts"),
    ):
        # torch's CheckpointException does not derive from Exception.
        with pytest.raises(BaseException, match=r"is on rank \d, and .* needs its values on this rank") as caught:
            save()
        found.append(str(caught.value))
    whole = pipe.state_dict()
    save_by_torch(whole, checkpoint_id=folder / "whole")
    loaded = {name: torch.zeros_like(value) for name, value in whole.items()}
    load_by_torch(loaded, checkpoint_id=folder / "whole")
    assert all(torch.equal(value, whole[name]) for name, value in loaded.items())
    save_model(pipe, str(file))
    assert all(torch.equal(value, whole[name]) for name, value in load_file(file).items())
    pipe.close()
    return found


def test_what_others_save_is_whole_or_refused_by_name(tmp_path: Path) -> None:
    assert [len(found) for found in ranks(2, save_by_others, tmp_path)] == [9, 9]


def save_local(rank: int, n: int, folder: Path) -> str:
    """Give each rank's optimizer only the parameters of that rank: a checkpoint would miss the rest."""
    model, _ = build()
    pipe = fxsplit.compile(model, "world", **OPTIONS)
    optimizer = torch.optim.AdamW(pipe.local_parameters())
    with pytest.raises(RanksDiffer) as caught:
        fxsplit.save_checkpoint(folder, pipe, optimizer, step=1)
    pipe.close()
    return str(caught.value)


def test_optimizers_of_other_parameters_are_named(tmp_path: Path) -> None:
    first, second = ranks(2, save_local, tmp_path)
    assert first == second and "AdamW of" in first and "parameters with names of hash" in first
    assert not any(tmp_path.iterdir())


def load_damaged(rank: int, n: int, folder: Path) -> list[bool]:
    """Load a checkpoint that is damaged only in the part of rank 1, and check that no rank changes anything."""
    model, optimizer = build(seed=8)
    pipe = fxsplit.compile(model, "world", **OPTIONS)
    step(pipe, optimizer)
    before = hash_state(read(model, optimizer))
    found = []
    for path in sorted(folder.iterdir()):
        with pytest.raises(InputError, match=r"when it was saved|cannot be read as JSON"):
            fxsplit.load_checkpoint(path, pipe, optimizer)
        found.append(hash_state(read(model, optimizer)) == before)
    pipe.close()
    return found


def test_no_rank_loads_what_another_one_refuses(tmp_path: Path) -> None:
    for number, (name, value) in enumerate(
        {
            "optimizer.blocks.4.weight.exp_avg": torch.zeros(3),
            "json.blocks.4.bias.x": torch.zeros(2, dtype=torch.uint8),
            "optimizer.words.weight.exp_avg": torch.zeros(3),
        }.items()
    ):
        path, _ = save_three_steps(tmp_path / "made")
        file, manifest = path / "training.safetensors", json.loads((path / "checkpoint.json").read_text())
        save_file(load_file(file) | {name: value}, file)
        if name.startswith("json"):
            manifest["training"][name] = checkpoint_storage.name_kind(value)
            (path / "checkpoint.json").write_text(json.dumps(manifest))
        path.rename(tmp_path / f"step-{number}")
    (tmp_path / "made").rmdir()
    assert ranks(2, load_damaged, tmp_path) == [[True] * 3] * 2
