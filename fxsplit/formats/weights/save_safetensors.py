"""Write checkpoints as safetensors files with Hugging Face's names: either all tensors are written or no file changes.

    | 8 bytes: length of header | header (JSON): name -> dtype, shape, offsets | bytes of the tensors |

Tensors are copied to host memory one at a time, so the additional memory is one tensor.
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
from fxsplit.torch_internals.scopes.undo import restore_after

ONE_FILE = name_file("model", 0, 1)
OF_A_CHECKPOINT = re.compile(r"model\.safetensors(\.index\.json)?|model-\d{5,}-of-\d{5,}\.safetensors")
"""Matches the names of a checkpoint's files, which the next checkpoint in the same folder replaces."""
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip
"""torch's dtype -> its name in the safetensors format."""


Fetch = Callable[[str, Tensor], Tensor]
"""A function that returns the values of a named tensor, which may be in another process."""
Together = Callable[[Mapping[str, Tensor], Callable[[Fetch], None]], None]
"""A function that calls its second argument in one process, with access to the tensors of all processes.

The second argument writes the tensors. It gets a Fetch, which returns the values of a tensor of any process.
"""


def save_checkpoint(
    model: nn.Module, folder: str | os.PathLike[str], max_shard_bytes: int, together: Together | None = None
) -> None:
    """Write the tensors of a model's state_dict to a folder, in files of at most `max_shard_bytes` bytes of tensors.

    together: how to write from several processes that each have some of the tensors (default: this process has all).
    A larger tensor gets its own file. A tied weight is written once, under its first name. Afterwards the folder
    contains the whole checkpoint instead of an earlier one. After an error the folder is unchanged. Other files in the
    folder stay. Raises InputError if the format cannot express the model's state, and FileError if writing fails.
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
    """Return `tensor` itself: the Fetch for tensors of this process."""
    return tensor


def _list_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state_dict by name, each object once. Raises InputError for other values."""
    held: dict[int, tuple[str, Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"state_dict() of {type(model).__name__} holds {name!r}, a {type(value).__name__}, and safetensors "
                "files hold only tensors: save it with torch.save(pipe.state_dict(), path)"
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
    """Return the names of the tensors for each file, in order, by the rule that Hugging Face uses for shards."""
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
    """Write the files to a temporary folder, and move them to their place once all are complete."""
    there = folder.is_dir()
    # On the same disk, so that moving does not copy.
    temporary = (folder if there else folder.absolute().parent) / f"{BEING_WRITTEN}{secrets.token_hex(8)}"
    change = _Change(temporary)
    with restore_after(change.settle):
        made = temporary / "new"
        made.mkdir(parents=True)
        names = [name_file("model", number, len(shards)) for number in range(len(shards))]
        # Asking for the next tensor reports the previous one as written.
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
        (temporary / "old").mkdir()
        # Remove the old index first and add the new one last, so that a crash leaves no index of two checkpoints.
        change.make(
            [
                *((folder / name, temporary / "old" / name) for name in sorted(before, key=lambda name: name != INDEX)),
                *((made / name, folder / name) for name in names),
            ]
        )


class _Change:
    """Moves files, either all or none, and removes the temporary folder that held them."""

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary
        self._moves: list[tuple[Path, Path]] = []
        self._complete = False

    def make(self, moves: list[tuple[Path, Path]]) -> None:
        """Move each source to its target, in order. A target must be free when its turn comes."""
        self._moves = moves
        for source, target in moves:
            os.rename(source, target)
        self._complete = True

    def settle(self) -> None:
        """Undo the moves unless all succeeded, and remove the temporary folder. May be called repeatedly."""
        if not self._complete:
            for source, target in reversed(self._moves):
                if not source.exists() and target.exists():
                    os.rename(target, source)
        shutil.rmtree(self._temporary, ignore_errors=True)


def _write_index(path: Path, state: Mapping[str, Tensor], shards: Mapping[str, Sequence[str]]) -> None:
    """Write the index: the file of each tensor, and the total size."""
    sizes = {
        "total_parameters": sum(t.numel() for t in state.values()),
        "total_size": sum(t.nbytes for t in state.values()),
    }
    file_of = {name: file for file, names in shards.items() for name in names}
    _flush(path, [render_index(sizes, file_of).encode])


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], tick: Callable[[], object] = lambda: None, fetch: Fetch = _take
) -> None:
    """Write one safetensors file and flush it to disk. Raises OSError.

    tick: called before each tensor, to report progress. fetch: returns the values of a tensor.
    """
    # Sort by item size, largest first, so that each tensor is aligned to its item size.
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
    """Return the bytes of a tensor, copied to host memory, row by row."""
    here = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    plain = torch.view_as_real(here) if here.is_complex() else here
    numbers: Any = plain.reshape(-1).view(torch.uint8).numpy()  # mypy does not accept an array as a buffer
    return memoryview(numbers)


def _flush(path: Path, parts: Sequence[Callable[[], bytes | memoryview]]) -> None:
    """Write a new file from `parts`, and flush it to disk. Each part is a function, called only when its turn comes."""
    with open(path, "xb") as file:
        for part in parts:
            file.write(part())
        file.flush()
        # Without fsync, a crash could leave the new name without contents.
        os.fsync(file.fileno())
