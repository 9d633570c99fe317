"""Folders of checkpoints: `step-7` and so on, each complete or not there.

A checkpoint is written under another name and moved to its own when all of it is on the disk. It consists of

    checkpoint.json                  what follows: the step, the options of the optimizer, names of tied weights
    model.safetensors                weights by the names of the model's state_dict, as Hugging Face reads them; of
                                     several ranks model-00001-of-00002.safetensors and so on, with their index
    training-00001-of-00002.safetensors   what the optimizer keeps of each weight, and the state of random numbers
    plan.json, costs.json            the plan, and the profile that it was made of

All of it is data: nothing in it is pickled.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fxsplit.errors import FileError, InputError
from fxsplit.ir.facts.figures import is_count, show
from fxsplit.ir.files import BEING_WRITTEN, explain_unreadable, explain_unwritable, make_folder, write_whole

MANIFEST, PLAN, COSTS = "checkpoint.json", "plan.json", "costs.json"
FORMAT, VERSION = "fxsplit checkpoint", 1
STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Group:
    """A group of an optimizer: the names of its parameters, and its options, as JSON has them."""

    parameters: list[str]
    options: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    step: the user's number. files: names of the safetensors files. tied: for each further name of a tied weight the
    name that it is stored by. optimizer: the name of its class, or None where there was none. extra: the user's own.
    gradient_hook: what added gradients over ranks, where that keeps something from step to step.
    """

    step: int
    files: list[str]
    tied: dict[str, str] = field(default_factory=dict)
    optimizer: str | None = None
    groups: list[Group] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    gradient_hook: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def to_text(self) -> str:
        """Return it as JSON; raises InputError for what JSON has no words for."""
        try:
            return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"a checkpoint cannot hold {show(self.extra)} as JSON: {error}") from error


def read_manifest(folder: Path) -> Manifest:
    """Return what a checkpoint says of itself; raises InputError for a folder that is no complete checkpoint."""
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT or data.pop("version") != VERSION:
            raise InputError(f"{str(path)!r} is of another format or version: read it with the fxsplit that wrote it")
        data["groups"] = [Group(**group) for group in data["groups"]]
        manifest = Manifest(**data)
        _check_manifest(manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{str(path)!r} cannot be read as a checkpoint: {explain_unreadable(error)}") from error
    # A name with a folder in it could lead anywhere, and a checkpoint may come from others.
    for name in manifest.files:
        if os.path.basename(name) != name or not (folder / name).is_file():
            raise InputError(
                f"{str(path)!r} names {show(name)}, which is no file beside it: is the checkpoint complete?"
            )
    return manifest


def _check_manifest(manifest: Manifest) -> None:
    """Raise ValueError unless everything in it is of its type."""
    groups = [(group.parameters, group.options) for group in manifest.groups]
    fine = (
        is_count(manifest.step)
        and all(isinstance(name, str) for name in manifest.files)
        and all(isinstance(name, str) for pair in manifest.tied.items() for name in pair)
        and isinstance(manifest.extra, dict)
        and isinstance(manifest.gradient_hook, (str, type(None)))
        and all(isinstance(name, str) for names, _ in groups for name in names)
        and all(isinstance(options, dict) for _, options in groups)
    )
    if not fine:
        raise ValueError("a value is of another type than it should be")


def list_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the complete checkpoints in a folder, the newest last; none for a folder that is not there."""
    try:
        found = [(int(m[1]), path) for path in Path(folder).iterdir() if (m := STEP.fullmatch(path.name))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise InputError(f"{os.fspath(folder)!r} is no folder of checkpoints: {error}") from error
    return [path for _, path in sorted(found) if (path / MANIFEST).is_file()]


class NewCheckpoint:
    """A checkpoint that is being written; it is in its place, whole, after `complete`.

    token: what tells it from others that are being written; all ranks that write it have the same.
    """

    def __init__(self, folder: Path, step: int, token: str) -> None:
        self.path = folder / f"step-{step}"
        self.beside = folder / f"{BEING_WRITTEN}step-{step}-{token}"

    def begin(self) -> None:
        """Make the folder to write in; raises FileError."""
        make_folder(self.beside)

    def clear_others(self) -> None:
        """Remove what was left by a process that was ended while it saved."""
        for path in self.path.parent.glob(f"{BEING_WRITTEN}step-*"):
            if path != self.beside:
                shutil.rmtree(path, ignore_errors=True)

    def complete(self, manifest: Manifest) -> None:
        """Write the manifest, and move everything to its place; raises FileError."""
        missing = [name for name in manifest.files if not (self.beside / name).is_file()]
        if missing:
            raise FileError(
                f"{missing[0]!r}, which another rank has written, is not in {str(self.beside)!r} here: give a folder "
                "that all hosts share"
            )
        write_whole(self.beside / MANIFEST, manifest.to_text())
        old = self.beside.with_name(self.beside.name + "-old")
        try:
            _flush_folder(self.beside)
            # A folder with contents is not replaced in one step. A computer that stops between leaves the one before.
            if self.path.exists():
                os.rename(self.path, old)
            os.rename(self.beside, self.path)
            _flush_folder(self.path.parent)
        except OSError as error:
            raise explain_unwritable(f"cannot complete {str(self.path)!r}", error) from error
        shutil.rmtree(old, ignore_errors=True)

    def abandon(self) -> None:
        """Remove what has been written."""
        shutil.rmtree(self.beside, ignore_errors=True)


def make_token() -> str:
    """Return a new token for a checkpoint that is to be written."""
    return secrets.token_hex(8)


def remove_older(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints of a folder."""
    for path in list_checkpoints(folder)[:-keep]:
        # Without its manifest it is none any more, whatever comes in between.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def _flush_folder(path: Path) -> None:
    """Let the names in a folder reach the disk, where the system can do so."""
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
