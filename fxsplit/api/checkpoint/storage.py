"""Storage for torch.distributed.checkpoint that writes and reads tensors as safetensors files.

torch's own storage keeps its table of contents as a pickle, which can run any code when it is read. torch's storage for
safetensors does not support bool.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from fxsplit.errors import InputError
from fxsplit.formats.weights.checkpoint_folder import NewCheckpoint
from fxsplit.formats.weights.safetensors_names import INDEX, name_file, render_index
from fxsplit.formats.weights.safetensors_reader import TensorFile
from fxsplit.formats.weights.save_safetensors import NAMES, write_tensors
from fxsplit.system.files import explain_unwritable, write_whole

MODEL, OPTIMIZER, JSON, RANDOM = "model.", "optimizer.", "json.", "random."
"""Prefixes of names: weights, tensors of an optimizer, other values of an optimizer, states of random numbers."""
TYPED = "typed."
"""The prefix of an optimizer's values that plain JSON would change: trees with the notes of `typed_json`."""
RESIDUAL = "residual."
"""The prefix of residuals of gradient hooks; the number of the pipeline follows it."""


class FolderWriter(StorageWriter):
    """Writes the tensors of each rank to the rank's own files.

    complete: a function that the first rank calls after all ranks have written. Its arguments are the names of all
    files, and name -> dtype and shape of the tensors of all ranks.
    """

    def __init__(self, new: NewCheckpoint, n_ranks: int, complete: Callable[[list[str], dict[str, str]], None]) -> None:
        self._new = new
        self._n = n_ranks
        self._complete = complete
        self._rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: torch calls this to name a checkpoint, but the writer already has one."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Create the folder, on the first rank. torch lets no rank write before this has returned."""
        self._rank = int(kwargs.get("rank", 0))
        if is_coordinator:
            self._new.begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return this rank's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return all ranks' plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors to its files, one for weights and one for all else; return a finished Future."""
        self._new.join()
        held: dict[str, dict[str, Tensor]] = {"model": {}, "training": {}}
        index_of: dict[str, MetadataIndex] = {}
        for item in plan.items:
            name, value = item.index.fqn, planner.resolve_data(item)
            assert isinstance(value, Tensor), "only tensors are saved"
            index_of[name] = item.index
            held["model" if name.startswith(MODEL) else "training"][name] = value.detach()
        results = []
        for kind, tensors in held.items():
            if not tensors:
                continue
            file = name_file(kind, self._rank, self._n)
            try:
                write_tensors(self._new.beside / file, {_name_stored(name): t for name, t in tensors.items()})
            except OSError as error:
                raise explain_unwritable(
                    f"cannot write {file!r} of the checkpoint {str(self._new.path)!r}", error
                ) from error
            results += [WriteResult(index_of[name], t.nbytes, file) for name, t in tensors.items()]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint, once all ranks have written."""
        written = [result for of_rank in results for result in of_rank]
        weights = [result for result in written if result.index.fqn.startswith(MODEL)]
        if self._n > 1:
            file_of = {_name_stored(result.index.fqn): result.storage_data for result in weights}
            sizes = {"total_size": sum(result.size_in_bytes for result in weights)}
            write_whole(self._new.beside / INDEX, render_index(sizes, file_of))
        kinds = metadata.state_dict_metadata
        found = {result.index.fqn: _name_stored_kind(kinds[result.index.fqn]) for result in written}
        self._complete(sorted({result.storage_data for result in written}), found)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: torch must not choose this storage for a folder by itself."""
        return False


class FolderReader(StorageReader):
    """Reads tensors from the files of a checkpoint. Each file is open only while it is read."""

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        self._folder = folder
        self._file_of: dict[str, str] = {}
        self.kinds: dict[str, Tensor] = {}
        """For each tensor, a tensor on the meta device with its shape and dtype."""
        for file in files:
            prefix = MODEL if file.startswith("model") else ""
            with TensorFile(folder / file) as opened:
                for name in opened.list_names():
                    if not prefix and not name.startswith((OPTIMIZER, JSON, TYPED, RANDOM, RESIDUAL)):
                        raise InputError(
                            f"{str(folder / file)!r} holds {name!r}, which is not part of a checkpoint: remove it"
                        )
                    if prefix + name in self.kinds:
                        raise InputError(
                            f"{str(folder / file)!r} holds {name!r}, and so does {self._file_of[prefix + name]!r}"
                        )
                    self._file_of[prefix + name] = file
                    self.kinds[prefix + name] = opened.read_kind(name)

    def read_all(self, names: Iterable[str]) -> Mapping[str, Tensor]:
        """Return the tensors `names` of the checkpoint, in newly allocated memory."""
        found: dict[str, Tensor] = {}
        wanted = set(names)
        for file in sorted({self._file_of[name] for name in wanted}):
            with TensorFile(self._folder / file) as opened:
                found |= {n: opened.read(_name_stored(n)) for n in wanted if self._file_of[n] == file}
        return found

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: torch calls this to name a checkpoint, but the reader already has one."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the names, shapes and dtypes of all tensors."""
        return Metadata({name: _describe(kind) for name, kind in self.kinds.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the reader is ready."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return this rank's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return all ranks' plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors that torch's plan asks for, file by file, into their targets; return a finished Future."""
        # By file, so that each file is opened once.
        for file in sorted({self._file_of[item.storage_index.fqn] for item in plan.items}):
            with TensorFile(self._folder / file) as opened:
                for item in plan.items:
                    name = item.storage_index.fqn
                    if self._file_of[name] != file:
                        continue
                    value = opened.read(_name_stored(name))
                    for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        value = value.narrow(dim, begin, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(value)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: torch must not choose this storage for a folder by itself."""
        return False


def _name_stored(name: str) -> str:
    """Return the name of a tensor in its file. A weight has its name in state_dict() there, without `model.`."""
    return name.removeprefix(MODEL) if name.startswith(MODEL) else name


def name_kind(kind: Tensor) -> str:
    """Return the dtype and the shape of a tensor as a text, such as "F32 [4, 4]"."""
    return f"{NAMES.get(kind.dtype, kind.dtype)} {list(kind.shape)}"


def check_training(kinds: Mapping[str, Tensor], written: Mapping[str, str] | None, where: str) -> None:
    """Raise InputError unless the tensors that are not weights have the names, dtypes and shapes that were written.

    written: name -> dtype and shape, from the manifest. None for an older checkpoint, which is not checked.
    """
    if written is None:
        return
    found = {name: name_kind(kind) for name, kind in kinds.items() if not name.startswith(MODEL)}
    for name in [*written, *found]:
        if written.get(name) != found.get(name):
            raise InputError(
                f"{name!r} is {found.get(name, 'not there')} in {where}, and was {written.get(name, 'not there')} when "
                "it was saved: is the checkpoint complete?"
            )


def _name_stored_kind(entry: Any) -> str:
    """Return the dtype and the shape as text, from torch's metadata of a tensor."""
    return name_kind(torch.empty(entry.size, dtype=entry.properties.dtype, device="meta"))


def _describe(kind: Tensor) -> TensorStorageMetadata:
    """Return torch's metadata for a tensor that is stored in one piece."""
    whole = ChunkStorageMetadata(torch.Size([0] * kind.ndim), kind.shape)
    return TensorStorageMetadata(TensorProperties(dtype=kind.dtype), kind.shape, [whole])


def save_tensors(staged: dict[str, Any], writer: FolderWriter, group: Any = None) -> None:
    """Save tensors by name.

    With a process group each of its ranks saves its own; without one only this process saves.
    """
    if group is not None:
        save(staged, storage_writer=writer, process_group=group)
        return
    # The steps of torch's save() for one process, which warns if there is no process group.
    planner = DefaultSavePlanner()
    planner.set_up_planner(staged, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])


def load_tensors(targets: dict[str, Any], reader: FolderReader) -> None:
    """Fill `targets` with the checkpoint's tensors of the same names. Every rank reads its own tensors."""
    planner = DefaultLoadPlanner()
    planner.set_up_planner(targets, reader.read_metadata(), is_coordinator=True)
    (plan,) = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plan), planner).wait()
