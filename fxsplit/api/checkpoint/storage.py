"""Where torch.distributed.checkpoint puts the tensors of a checkpoint, and finds them again: safetensors files.

torch's own storage keeps its table of contents as a pickle, which runs code of whoever wrote it, and its storage for
safetensors has no word for bool."""

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
"""How names begin of weights, of tensors that an optimizer keeps, of its other values, and of random numbers' state."""
TYPED = "typed."
"""How names begin of an optimizer's values that JSON alone would not give back: trees with notes of `typed_json`."""
RESIDUAL = "residual."
"""How names begin of what gradient hooks have left out; behind it is the number of the pipeline."""


class FolderWriter(StorageWriter):
    """Writes the tensors of each rank to files of its own.

    complete: called by the first rank with the names of all files, and with the kind of each tensor of all ranks.
    """

    def __init__(self, new: NewCheckpoint, n_ranks: int, complete: Callable[[list[str], dict[str, str]], None]) -> None:
        self._new = new
        self._n = n_ranks
        self._complete = complete
        self._rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a checkpoint, which is known already."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Let the first rank make the folder. The others have its plan before they write."""
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
        """Write this rank's tensors."""
        self._new.join()
        held: dict[str, dict[str, Tensor]] = {"model": {}, "training": {}}
        index_of: dict[str, MetadataIndex] = {}
        for item in plan.items:
            name, value = item.index.fqn, planner.resolve_data(item)
            assert isinstance(value, Tensor), "tensors alone are saved"
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
        """Return False: a folder by itself does not choose this storage."""
        return False


class FolderReader(StorageReader):
    """Reads tensors from the files of a checkpoint; each is open as long as it is needed."""

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        self._folder = folder
        self._file_of: dict[str, str] = {}
        self.kinds: dict[str, Tensor] = {}
        """For each tensor one without values, of its shape and dtype."""
        for file in files:
            prefix = MODEL if file.startswith("model") else ""
            with TensorFile(folder / file) as opened:
                for name in opened.list_names():
                    if not prefix and not name.startswith((OPTIMIZER, JSON, TYPED, RANDOM, RESIDUAL)):
                        raise InputError(f"{str(folder / file)!r} holds {name!r}, which is nothing of a checkpoint")
                    if prefix + name in self.kinds:
                        raise InputError(
                            f"{str(folder / file)!r} holds {name!r}, and so does {self._file_of[prefix + name]!r}"
                        )
                    self._file_of[prefix + name] = file
                    self.kinds[prefix + name] = opened.read_kind(name)

    def read_all(self, names: Iterable[str]) -> Mapping[str, Tensor]:
        """Return tensors of the checkpoint, in memory of their own."""
        found: dict[str, Tensor] = {}
        wanted = set(names)
        for file in sorted({self._file_of[name] for name in wanted}):
            with TensorFile(self._folder / file) as opened:
                found |= {n: opened.read(_name_stored(n)) for n in wanted if self._file_of[n] == file}
        return found

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to read a checkpoint, which is known already."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what tensors there are."""
        return Metadata({name: _describe(kind) for name, kind in self.kinds.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Be ready to read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return this rank's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return all ranks' plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for, file by file."""
        # By file, as each is opened once.
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
        """Return False: a folder by itself does not choose this storage."""
        return False


def _name_stored(name: str) -> str:
    """Return the name of a tensor in its file: weights have those of the model."""
    return name.removeprefix(MODEL) if name.startswith(MODEL) else name


def name_kind(kind: Tensor) -> str:
    """Return the dtype and the shape of a tensor as a text, such as "F32 [4, 4]"."""
    return f"{NAMES.get(kind.dtype, kind.dtype)} {list(kind.shape)}"


def check_training(kinds: Mapping[str, Tensor], written: Mapping[str, str] | None, where: str) -> None:
    """Raise InputError unless the tensors beside the weights are those that were written, with dtypes and shapes.

    written: these by name; an older checkpoint has none, and passes.
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


def _name_stored_kind(told: Any) -> str:
    """Return the dtype and the shape of a tensor that torch has told of."""
    return name_kind(torch.empty(told.size, dtype=told.properties.dtype, device="meta"))


def _describe(kind: Tensor) -> TensorStorageMetadata:
    """Return what torch is to know of a tensor, which is stored in one piece."""
    whole = ChunkStorageMetadata(torch.Size([0] * kind.ndim), kind.shape)
    return TensorStorageMetadata(TensorProperties(dtype=kind.dtype), kind.shape, [whole])


def save_tensors(staged: dict[str, Any], writer: FolderWriter, group: Any = None) -> None:
    """Save tensors by name, each rank of a process group those that it has; without a group this process does alone."""
    if group is not None:
        save(staged, storage_writer=writer, process_group=group)
        return
    # What torch does for one process; its own function warns where there is no process group.
    planner = DefaultSavePlanner()
    planner.set_up_planner(staged, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])


def load_tensors(targets: dict[str, Any], reader: FolderReader) -> None:
    """Fill tensors with those that a checkpoint has by their names. Every rank reads by itself what it has."""
    planner = DefaultLoadPlanner()
    planner.set_up_planner(targets, reader.read_metadata(), is_coordinator=True)
    (plan,) = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plan), planner).wait()
