"""Checkpoints written: safetensors files as Hugging Face names them, one tensor after another, all of them or none.

A safetensors file is eight bytes with the length of its header, the header in JSON, and the bytes of the tensors.
Each tensor is copied to host memory when its turn comes, so that no more than one of them is there besides the weights.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxsplit.errors import InputError
from fxsplit.formats.weights.safetensors_names import INDEX, name_file, render_index
from fxsplit.system.figures import is_count, show
from fxsplit.system.files import BEING_WRITTEN, explain_unwritable, make_folder
from fxsplit.system.progress import track
from fxsplit.system.progress_bar import show_progress
from fxsplit.torch_internals.scopes.undo import undo_after

ONE_FILE = name_file("model", 0, 1)
OF_A_CHECKPOINT = re.compile(r"model\.safetensors(\.index\.json)?|model-\d{5,}-of-\d{5,}\.safetensors")
"""Names of files that a checkpoint consists of, which the next one in the same folder takes the place of."""
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip
"""What the format calls a dtype."""


Fetch = Callable[[str, Tensor], Tensor]
"""Returns a tensor, which has a name, with its values: these may be in another process."""
Together = Callable[[Mapping[str, Tensor], Callable[[Fetch], None]], None]
"""Calls a function that writes tensors, in one of the processes that have them."""


def save_checkpoint(
    model: nn.Module, folder: str | os.PathLike[str], max_shard_bytes: int, together: Together | None = None
) -> None:
    """Write the tensors of a model's state_dict to a folder, in files of at most so many bytes of tensors.

    together: how several processes do so, which each have some of the tensors (default: this one has all).

    A tensor that is larger has a file of its own. A tied weight is written once, under the first of its names. The
    folder holds the whole checkpoint afterwards, in place of one that it held before, or it is as it was. Other files
    in it stay. Raises InputError for a model whose state no such file can hold, and FileError.
    """
    if not is_count(max_shard_bytes, least=1):
        raise InputError(f"max_shard_bytes={show(max_shard_bytes)}: give a number of bytes, such as 5_000_000_000")
    if not isinstance(folder, (str, os.PathLike)):
        raise InputError(f"folder={show(folder)}: give the path of a folder")
    state = _list_tensors(model)
    shards = _cut(state, max_shard_bytes)
    path = Path(folder)

    def write(fetch: Fetch) -> None:
        make_folder(path.absolute().parent)
        if path.exists() and not path.is_dir():
            raise InputError(f"{str(path)!r} is a file: give the path of a folder")
        try:
            with show_progress():
                _write_all(path, state, shards, fetch)
        except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
            raise explain_unwritable(f"cannot write a checkpoint to {str(path)!r}", error) from error

    if together is None:
        write(_take)
    else:
        together(state, write)


def _take(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of this process."""
    return tensor


def _list_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state_dict by name, each object once; raises InputError for what is none."""
    held: dict[int, tuple[str, Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"state_dict() of {type(model).__name__} holds {name!r}, a {type(value).__name__}, and safetensors "
                "files hold tensors alone: save it with torch.save(pipe.state_dict(), path)"
            )
        if is_lazy(value) or value.is_meta:
            raise InputError(f"{name!r} has no values yet: load its weights first, with pipe.load_weights(path)")
        if value.layout != torch.strided or value.dtype not in NAMES:
            raise InputError(
                f"{name!r} is a tensor of {value.dtype} and {value.layout}, which no safetensors file holds: save it "
                "with torch.save(pipe.state_dict(), path)"
            )
        held.setdefault(id(value), (name, value.detach()))
    return dict(held.values())


def _cut(state: Mapping[str, Tensor], max_shard_bytes: int) -> list[list[str]]:
    """Return the names of the tensors of each file, in order, as Hugging Face cuts them."""
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, tensor in state.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards


def _write_all(folder: Path, state: Mapping[str, Tensor], shards: Sequence[Sequence[str]], fetch: Fetch) -> None:
    """Write the files beside their place, and move them there once all are whole."""
    there = folder.is_dir()
    # On the same disk as the folder, so that nothing is copied when it is moved.
    beside = (folder if there else folder.absolute().parent) / f"{BEING_WRITTEN}{secrets.token_hex(8)}"
    change = _Change(beside)
    with undo_after(change.settle):
        made = beside / "new"
        made.mkdir(parents=True)
        names = [name_file("model", number, len(shards)) for number in range(len(shards))]
        # Asked for the next tensor, it tells that the one before has been written.
        turns = track(list(state), "saving weights")
        for file, shard in zip(names, shards, strict=True):
            write_tensors(made / file, {name: state[name] for name in shard}, partial(next, turns, None), fetch)
        if len(shards) > 1:
            _write_index(made / INDEX, state, dict(zip(names, shards, strict=True)))
            names.append(INDEX)
        next(turns, None)
        if not there:
            change.make([(made, folder)])
            return
        before = sorted(p.name for p in folder.iterdir() if OF_A_CHECKPOINT.fullmatch(p.name))
        (beside / "old").mkdir()
        # The old index goes first and the new one comes last: a computer that stops between leaves no index that names
        # files of two checkpoints.
        change.make(
            [
                *((folder / name, beside / "old" / name) for name in sorted(before, key=lambda name: name != INDEX)),
                *((made / name, folder / name) for name in names),
            ]
        )


class _Change:
    """Files that are moved, all of them or none, and the folder that holds them meanwhile."""

    def __init__(self, beside: Path) -> None:
        self._beside = beside
        self._moves: list[tuple[Path, Path]] = []
        self._complete = False

    def make(self, moves: list[tuple[Path, Path]]) -> None:
        """Move each file to its place, in order; no file is in the way there when its turn comes."""
        self._moves = moves
        for source, target in moves:
            os.rename(source, target)
        self._complete = True

    def settle(self) -> None:
        """Put the files back that were moved, unless all were, and remove the folder beside; may be called again."""
        if not self._complete:
            for source, target in reversed(self._moves):
                if not source.exists() and target.exists():
                    os.rename(target, source)
        shutil.rmtree(self._beside, ignore_errors=True)


def _write_index(path: Path, state: Mapping[str, Tensor], shards: Mapping[str, Sequence[str]]) -> None:
    """Write which file holds each tensor, and how many bytes they have together."""
    sizes = {
        "total_parameters": sum(t.numel() for t in state.values()),
        "total_size": sum(t.nbytes for t in state.values()),
    }
    file_of = {name: file for file, names in shards.items() for name in names}
    _flush(path, [render_index(sizes, file_of).encode])


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], tick: Callable[[], object] = lambda: None, fetch: Fetch = _take
) -> None:
    """Write one safetensors file, down to the disk; `tick` is called before each tensor. Raises OSError."""
    # The largest numbers first, so that each tensor begins at a multiple of its numbers' size.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def read(name: str) -> memoryview:
        tick()
        return _read_bytes(fetch(name, tensors[name]))

    _flush(path, [lambda: len(text).to_bytes(8, "little") + text, *(partial(read, name) for name in names)])


def _read_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, row by row, from host memory."""
    here = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    plain = torch.view_as_real(here) if here.is_complex() else here
    numbers: Any = plain.reshape(-1).view(torch.uint8).numpy()  # mypy does not take an array for a buffer
    return memoryview(numbers)


def _flush(path: Path, parts: Sequence[Callable[[], bytes | memoryview]]) -> None:
    """Write a new file of these parts, each asked for in its turn, down to the disk."""
    with open(path, "xb") as file:
        for part in parts:
            file.write(part())
        file.flush()
        # Without this a computer that stops could be left with the new name and none of the contents.
        os.fsync(file.fileno())
