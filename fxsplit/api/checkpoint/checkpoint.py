"""Save and load the weights and the optimizer of a training run, under the names of the model's state_dict.

torch.distributed.checkpoint does both. A checkpoint that a pipeline saved, on any number of devices or ranks, loads in
a pipeline on any other number, and in the plain model.

  folder/step-7/    model*.safetensors       the weights: one file, or one for each rank and an index
                    training*.safetensors    optimizer state, random state, residuals of gradient hooks
                    checkpoint.json          the manifest: step, groups of the optimizer, extra=, the list of files
                    plan.json, costs.json    of a compiled pipeline
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxsplit.api.checkpoint.gradient_residuals import give_residuals, plan_residuals, read_residuals
from fxsplit.api.checkpoint.optimizer import describe_groups, give_optimizer, plan_optimizer, read_optimizer
from fxsplit.api.checkpoint.storage import (
    MODEL,
    RANDOM,
    FolderReader,
    FolderWriter,
    check_training,
    load_tensors,
    save_tensors,
)
from fxsplit.api.checkpoint.weights import check_apart, check_model, give_apart, make_room, read_model, refuse_remote
from fxsplit.api.compiler.compile_group import CompileGroup
from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.api.pipeline.saving import Saving, wait_for_saving
from fxsplit.errors import ElsewhereError, FxsplitError, InputError, RankError
from fxsplit.formats.plan_json import save_plan
from fxsplit.formats.weights.checkpoint_folder import (
    COSTS,
    MANIFEST,
    PLAN,
    Manifest,
    NewCheckpoint,
    identify,
    list_checkpoints,
    make_token,
    put_back,
    read_manifest,
)
from fxsplit.formats.weights.typed_json import Notes, encode
from fxsplit.runtime.ranks.weight_placement import WeightPlacement
from fxsplit.runtime.ranks.world.agreement import hash_text
from fxsplit.runtime.ranks.world.messages import tell_beside
from fxsplit.system.figures import is_count, show
from fxsplit.system.interrupts import lose_no_interrupt
from fxsplit.system.logs import emit
from fxsplit.torch_internals.scopes.undo import restores_all
from fxsplit.torch_internals.thread_modes import leave_inference_mode

CPU = f"{RANDOM}cpu"


@dataclass(frozen=True)
class Restored:
    """The result of a load: the step of the checkpoint, the `extra` that was saved with it, and its path."""

    step: int
    extra: dict[Any, Any]
    path: Path


@lose_no_interrupt
@restores_all
def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    extra: Mapping[Any, Any] | None = None,
    keep: int | None = None,
) -> Saving:
    """Save a pipeline, or a model, with its optimizer as `folder/step-N`, while training goes on.

    All values are copied to host memory before this function returns. A thread then writes them. Checkpoints are
    written one at a time: a second call waits for the first. `wait()` on the result waits for this checkpoint, and so
    does the end of the process. A checkpoint is complete or absent: if the process is killed, the previous checkpoint
    remains the latest. Several threads and processes may save to one folder.

    step: the number of steps made so far, which loading returns.
    extra: further values to keep, such as a scheduler's state_dict(): numbers, texts, None, lists, tuples, dicts with
        any of these as keys, and tensors.
    keep: how many checkpoints stay in the folder (default: all): this one, and the last saved before it.

    Over ranks each rank of all pipelines calls this, and writes the weights of its stages; all hosts share the folder.
    The state of torch's CPU random numbers and `extra` are saved from the first rank. Raises InputError for values that
    no checkpoint can hold. Raises ElsewhereError for a model, not a pipeline, that has weights on other ranks. Also
    raises the error of this thread's last save.
    """
    if not is_count(step):
        raise InputError(f"step={show(step)}: give how many steps were made, such as 7")
    if keep is not None and not is_count(keep, least=1):
        raise InputError(f"keep={show(keep)}: give how many checkpoints are to stay, such as 3, or None for all")
    if not isinstance(folder, (str, os.PathLike)):
        raise InputError(f"folder={show(folder)}: give the path of a folder")
    own, encoded = _get_model(model), _encode_extra(extra)
    what = f"saves to {os.fspath(folder)!r}, with {describe_groups(own, optimizer)}"
    path, over_ranks = _make_absolute(folder), _get_compile_group(model) is not None
    # All pipelines of a mesh take part, even if they write nothing: torch needs all ranks to make a process group.
    with _meet(model, f"save_checkpoint(step={step})", what, side_by_side=True) as placement:
        # The copies need the memory that the last checkpoint holds until it is written.
        wait_for_saving(model, over_ranks=over_ranks)
        # Batches of a stream may write to buffers.
        with _keep_idle(model):
            staged, manifest = _stage(model, optimizer, step, encoded)
            staged |= read_residuals(own, _get_compile_group(model))
        token = make_token() if placement is None else placement.tell(make_token(), "a checkpoint")
        new = NewCheckpoint(path, step, token)
        if placement is None or placement.leads:
            new.check_place()
            # Only from the first rank: the generators of ranks are alike, or differ on purpose.
            staged[CPU] = torch.get_rng_state()
        group, column = (None, None) if placement is None else placement.find_groups()
    complete = partial(_complete, new, manifest, _list_texts(model), keep, [*read_model(own, filled=False).kinds])
    writer = FolderWriter(new, 1 if placement is None else len(placement), complete)
    write: Callable[[], None] = partial(_write, new, partial(save_tensors, staged, writer, group))
    if placement is not None and column is not None:
        write = partial(_write_for_all, new.path, write if placement.writes else None, column, placement.writer)
    saving = Saving(new.path, write, model, over_ranks=over_ranks)
    saving.start()
    return saving


def _encode_extra(extra: Mapping[Any, Any] | None) -> tuple[Any, Notes]:
    """Return a copy of `extra` as a tree of JSON and its notes (see typed_json)."""
    if not isinstance(extra, (Mapping, type(None))):
        raise InputError(f"extra={show(extra)}: give a dict, such as {{'scheduler': scheduler.state_dict()}}")
    return encode(extra if isinstance(extra, dict) else dict(extra or {}), "extra")


def _make_absolute(folder: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder: the program may change its current folder before the thread writes."""
    try:
        return Path(folder).absolute()
    except OSError as error:
        raise InputError(
            f"folder={os.fspath(folder)!r}: the current folder is gone ({error.strerror}): give the whole path"
        ) from error


def _write_for_all(path: Path, write: Callable[[], None] | None, column: Any, writer: int) -> None:
    """Write the weights of this rank's stages once for all pipelines of a mesh.

    Rank `writer` writes, and the others wait.
    `write` does it on rank `writer`, and is None on other ranks. They raise RankError if it fails.
    """
    if write is None:
        said = tell_beside(column, "", writer).strip()
        if said:
            raise RankError(
                f"rank {writer}, which writes the checkpoint {str(path)!r} for this rank too, failed: {said}"
            )
        return
    said = ""
    try:
        write()
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        raise
    finally:
        # Another rank that is gone must not hide the result of writing.
        with suppress(RankError):
            tell_beside(column, said, writer)


def _meet(
    model: nn.Module, call: str, what: str, *, side_by_side: bool = False
) -> AbstractContextManager[WeightPlacement | None]:
    """Run the block on all ranks of a pipeline together. Yields where this rank's weights are, or None without ranks.

    `call` and `what` describe the call. Ranks that describe different calls raise an error.
    """
    compile_group = _get_compile_group(model)
    return (
        nullcontext() if compile_group is None else compile_group.placement.agree(call, what, side_by_side=side_by_side)
    )


def _get_compile_group(model: nn.Module) -> CompileGroup | None:
    """Return the ranks that run a pipeline; None if this process runs the whole pipeline."""
    return model.compiler.compile_group if isinstance(model, Pipeline) else None


def _stage(
    model: nn.Module, optimizer: Optimizer | None, step: int, extra: tuple[Any, Notes]
) -> tuple[dict[str, Tensor], Manifest]:
    """Return copies in host memory of all that this process saves, and the manifest. `extra`: a tree and its notes."""
    own, compile_group = _get_model(model), _get_compile_group(model)
    state = read_model(own)
    if compile_group is None:
        refuse_remote(own, state, "save")
    groups, kept = ([], {}) if optimizer is None else read_optimizer(own, optimizer)
    manifest = Manifest(
        step,
        files=[],
        tied=state.tied,
        optimizer=None if optimizer is None else type(optimizer).__name__,
        groups=groups,
        extra=extra[0],
        extra_notes=extra[1],
        gradient_hook=None if compile_group is None else compile_group.reduction.kept_hook,
        versions={"torch": torch.__version__, "python": platform.python_version()},
    )
    named = {f"{MODEL}{name}": weight.detach() for name, weight in state.own.items()} | kept
    return {name: _copy_to_host(value) for name, value in named.items()}, manifest


def _copy_to_host(value: Tensor) -> Tensor:
    """Return a copy in host memory that later steps do not write to."""
    return value.clone() if value.device.type == "cpu" else value.cpu()


def _get_model(model: nn.Module) -> nn.Module:
    """Return the model of a pipeline, or the model itself. Raises InputError for anything else."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: give a pipeline, or a torch.nn.Module")
    return model.model if isinstance(model, Pipeline) else model


def _list_places(model: nn.Module) -> dict[int, torch.device]:
    """Return the device of each weight of a compiled pipeline, by the id() of the weight; empty for a model."""
    if not isinstance(model, Pipeline):
        return {}
    return {id(weight): device for weight, device in model.compiler.list_placed()}


def _list_texts(model: nn.Module) -> list[Callable[[Path], None]]:
    """Return functions that write the plan and the profile of a pipeline into a folder; none if nothing is compiled."""
    if not isinstance(model, Pipeline):
        return []
    found: list[Callable[[Path], None]] = []
    try:
        plan, costs = model.plan, model.costs
    except InputError:  # nothing is compiled yet, or nothing was measured
        return found
    return [lambda to: save_plan(plan, to / PLAN), lambda to: costs.save(to / COSTS)]


def _write(new: NewCheckpoint, save: Callable[[], None]) -> None:
    """Write a checkpoint. If that fails, remove its files."""
    try:
        save()
    except BaseException as error:
        new.abandon()
        raise _unwrap(error) from error


def _unwrap(error: BaseException) -> BaseException:
    """Return fxsplit's own error if torch has wrapped one, otherwise the error as it is."""
    failures = getattr(error, "failures", {})
    return next((e for e, _ in failures.values() if isinstance(e, (FxsplitError, OSError))), error)


def _complete(
    new: NewCheckpoint,
    manifest: Manifest,
    texts: list[Callable[[Path], None]],
    keep: int | None,
    weights: list[str],
    files: list[str],
    kinds: dict[str, str],
) -> None:
    """Write the files of a checkpoint that are not tensors, then move the checkpoint to its place.

    texts: functions that write such files into a folder.
    weights: the names of all weights. One that no rank has saved is an error.
    files: the names of all ranks' files.
    kinds: dtype and shape of each tensor in these files, by name.
    """
    missing = next((name for name in weights if f"{MODEL}{name}" not in kinds), None)
    if missing is not None:
        raise ElsewhereError(
            f"none of the ranks that save has the values of {missing!r}: save the pipeline that was compiled last"
        )
    for write in texts:
        write(new.beside)
    training = {name: kind for name, kind in kinds.items() if not name.startswith(MODEL)}
    new.complete(replace(manifest, files=files, training=training), keep)


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the absolute path of the newest complete checkpoint in a folder, by its step; None if there is none."""
    if not isinstance(folder, (str, os.PathLike)):
        raise InputError(f"folder={show(folder)}: give the path of a folder")
    path = _make_absolute(folder)
    put_back(path)
    return next(reversed(list_checkpoints(path)), None)


@lose_no_interrupt
@restores_all
@leave_inference_mode()
def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, *, random_state: bool = True
) -> Restored:
    """Load a checkpoint into a pipeline, or a model, and its optimizer; return its step and its `extra`.

    path: a checkpoint, or a folder of checkpoints, from which the latest is loaded. Parameters stay the same objects.
    optimizer: an optimizer of the class that was saved, with the same parameters. It gets the state of each parameter
        and the options of the groups, such as lr. It keeps options that only say how to compute, such as fused.
    random_state: whether torch's CPU random numbers continue from the saved state.

    Over ranks every rank calls this, and reads the weights of its stages. Raises InputError, before anything changes,
    for a folder without a complete checkpoint, for a checkpoint that has changed since it was written, and for a model
    or optimizer that does not match the checkpoint. Raises ElsewhereError for a model, not a pipeline, that has weights
    on other ranks.
    """
    found = _find(path)
    own = _get_model(model)
    written = identify(found)
    manifest = read_manifest(found)
    goal = f"loads {found.name} with a manifest of hash {hash_text(manifest.to_text()):x}"
    with _meet(model, "load_checkpoint()", goal, side_by_side=True), _keep_idle(model):
        reader, where = FolderReader(found, manifest.files), repr(str(found))
        check_training(reader.kinds, manifest.training, where)
        state = read_model(own, filled=False)
        if _get_compile_group(model) is None:
            refuse_remote(own, state, "load")
        stored = check_model(state, reader.kinds, manifest.tied, where)
        plan = None if optimizer is None else plan_optimizer(own, optimizer, manifest, reader, where)
        trains, compile_group = optimizer is not None, _get_compile_group(model)
        left = plan_residuals(own, compile_group, reader, manifest.gradient_hook, where, trains=trains)
        named = {name: f"{MODEL}{stored[name]}" for name in state.own}
        apart = {name: named.pop(name) for name in state.apart}
        values = reader.read_all([*left.values, *apart.values(), *([CPU] if CPU in reader.kinds else ())])
        given = {name: values[full] for name, full in apart.items()}
        check_apart(state, given, where)
        if random_state and CPU in values:
            _check_random(values[CPU], where)
        make_room(state, _list_places(model))
        targets = {full: state.own[name].detach() for name, full in named.items()}
        with torch.no_grad():
            load_tensors(targets | (plan.make_targets() if plan else {}), reader)
            give_apart(own, state, given)
        if optimizer is not None and plan is not None:
            give_optimizer(own, optimizer, plan)
        give_residuals(own, compile_group, left, values)
    if random_state and CPU in values:
        torch.set_rng_state(values[CPU])
    if identify(found) != written:
        raise InputError(
            f"{where} was replaced or removed by another thread or process while it was loaded, so the loaded values "
            "are a mixture: load again"
        )
    emit("checkpoints", "loaded", f"loaded {where}, of step {manifest.step}", path=str(found), step=manifest.step)
    return Restored(manifest.step, manifest.make_extra(), found)


def _keep_idle(model: nn.Module) -> AbstractContextManager[None]:
    """Wait for the batches of a pipeline that are under way, and return a block during which no batch runs."""
    return model.keep_idle() if isinstance(model, Pipeline) else nullcontext()


def _check_random(state: Tensor, where: str) -> None:
    """Raise InputError if `state` is not a state of torch's random numbers on the CPU."""
    try:
        torch.Generator().set_state(state)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"{CPU!r} in {where} is no state of random numbers of this torch ({error}): load with random_state=False"
        ) from error


def _find(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint that a path names. Raises InputError if there is none."""
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"path={show(path)}: give the path of a checkpoint, or of a folder of them")
    given = Path(path)
    found = given if (given / MANIFEST).is_file() else latest_checkpoint(given)
    if found is None:
        raise InputError(
            f"there is no complete checkpoint in {str(given)!r}: latest_checkpoint() returns None for such a folder"
        )
    return found
