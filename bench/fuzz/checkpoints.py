"""Damage checkpoints of safetensors files, and their index: each is loaded whole, or refused with nothing loaded.

A case is a checkpoint in one file or in two with an index, damaged a little, and loaded by a pipeline or into a model
without weights. Faults are: an error that is not fxsplit's own; a weight that differs from the file; a weight that has
changed although the checkpoint was refused. One case in three is a checkpoint of training (`_trainings.py`).
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import fxsplit
from bench.fuzz import Outcome
from bench.fuzz._trainings import try_training
from bench.fuzz.files import damage_bytes, damage_json
from fxsplit.errors import FxsplitError
from fxsplit.formats.weights.checkpoint_names import Extra
from fxsplit.formats.weights.safetensors_files import WeightFiles

INDEX = "model.safetensors.index.json"
CHAIN = "profile{repeats=1},augment,order,partition,emit,batch-norm"


class Model(nn.Module):
    """A weight with two names, buffers including a single number, and another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return one output row for each input row."""
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x)))) * self.scale.sum()  # type: ignore[operator]
        return out


@cache
def make_pipeline() -> tuple[Model, fxsplit.Pipeline, dict[str, Tensor]]:
    """Return a model, its pipeline, and the initial values of its weights."""
    model = Model()
    pipe = fxsplit.compile(model, 2, example_inputs=torch.randn(8, 4), n_microbatches=2, passes=CHAIN)
    return model, pipe, {name: value.clone() for name, value in model.state_dict().items()}


def write_checkpoint(r: random.Random, folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write values for a model's names, or for most of them, into one file or into two with an index."""
    made = {name: torch.rand_like(v) if v.is_floating_point() else v + 3 for name, v in state.items()}
    if r.random() < 0.7:  # a tied weight is in a file under one name, or under each with the same values
        made["last.weight"] = made["first.weight"].clone()
    odd = r.random()
    if odd < 0.2:
        made.pop(r.choice(list(made)))
    elif odd < 0.3:
        name = r.choice(list(made))
        made[name] = r.choice((made[name].double(), made[name].flatten(), made[name][None].clone(), made[name].half()))
    elif odd < 0.4:
        made["more"] = torch.zeros(r.choice((0, 1, 5)))
    if r.random() < 0.4:
        save_file(made, folder / "model.safetensors")
        return
    of = {name: f"model-{r.randrange(2)}.safetensors" for name in made}
    for file in ("model-0.safetensors", "model-1.safetensors"):
        save_file({name: value for name, value in made.items() if of[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 100}, "weight_map": of}))


def damage(r: random.Random, folder: Path) -> None:
    """Damage one of the files: its bytes, its header, the values of an index; or remove, double or replace it."""
    file = r.choice(sorted(folder.iterdir()))
    content, how = file.read_bytes(), r.random()
    if file.name == INDEX:
        file.write_bytes((damage_json if how < 0.7 else damage_bytes)(r, content))
    elif how < 0.5:  # eight bytes give the length of the header, which is JSON
        length = int.from_bytes(content[:8], "little")
        header = (damage_json if how < 0.35 else damage_bytes)(r, content[8 : 8 + length])
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    elif how < 0.75:
        file.write_bytes(damage_bytes(r, content))
    elif how < 0.8:
        file.write_bytes(r.randrange(2**64).to_bytes(8, "little") + content[8:])
    elif how < 0.85:
        file.unlink()
    elif how < 0.9:
        shutil.copy(file, folder / "other.safetensors")
    elif how < 0.95:
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(r.choice((b"", b"\x80\x04", b"\0" * 8, b"\xff" * 16, (2).to_bytes(8, "little") + b"{}")))


def read_values(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the checkpoint's values for the names that it has, read with safetensors and no code of fxsplit."""
    indices = sorted(path.glob("*.index.json")) if path.is_dir() else [path] if path.name == INDEX else []
    if indices:
        of = json.loads(indices[0].read_text())["weight_map"]
        files = {name: indices[0].parent / file for name, file in of.items()}
    else:
        (file,) = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        with safe_open(str(file), "pt") as handle:
            files = dict.fromkeys(handle.keys(), file)
    found: dict[str, Tensor] = {}
    for name in files.keys() & set(names):
        with safe_open(str(files[name]), "pt") as handle:
            found[name] = handle.get_tensor(name)
    return found


def find_fault(model: nn.Module, held: Mapping[str, Tensor]) -> str | None:
    """Return the weight of a loaded model that differs from the checkpoint; None if all are equal."""
    tied = {"first.weight": "last.weight", "last.weight": "first.weight"}
    for name, value in model.state_dict().items():
        said = held.get(name, held.get(tied.get(name, "")))
        # Damaged bytes may decode to NaN, which is equal to nothing.
        if said is None or not torch.equal(value.nan_to_num(), said.to(value.dtype).nan_to_num()):
            return f"{name} is not what the checkpoint says"
    return None


def try_case(seed: int) -> Outcome:
    """Load a damaged checkpoint, by a pipeline or into a model without weights, or one of training."""
    if seed % 3 == 2:
        return try_training(seed)
    r = random.Random(f"checkpoints {seed}")
    torch.manual_seed(seed)
    model, pipe, before = make_pipeline()
    model.load_state_dict(before)  # the case before may have changed them
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(r, folder, before)
        path = r.choice((folder, folder, *sorted(folder.iterdir())))
        if r.random() < 0.75:
            damage(r, folder)
        strict, empty = r.random() < 0.5, r.random() < 0.3
        dtype = r.choice((None, None, torch.float32, torch.float64))
        what = "without weights" if empty else "of a pipeline"
        try:
            if empty:
                with fxsplit.without_weights():
                    other: nn.Module = Model()
                WeightFiles(path, dtype).load(other, [], Extra.REFUSE if strict else Extra.IGNORE)
            else:
                other = model
                pipe.load_weights(path, strict=strict, dtype=dtype)
        except FxsplitError:
            kept = empty or all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            return Outcome(f"{what} refused", None if kept else "a refused checkpoint has changed weights")
        return Outcome(f"{what} loaded", find_fault(other, read_values(path, before)))
