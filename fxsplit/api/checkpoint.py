"""Checkpoints of training: the weights, what the optimizer keeps, and where one was, under the names of the model.

They are saved and loaded by torch.distributed.checkpoint. One that was saved by a pipeline, on any number of devices or
ranks, loads in a pipeline on any other number, and in the plain model.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxsplit.api.checkpoint_optimizer import give_optimizer, plan_optimizer, read_optimizer
from fxsplit.api.checkpoint_residuals import give_residuals, plan_residuals, read_residuals
from fxsplit.api.checkpoint_storage import MODEL, RANDOM, FolderReader, FolderWriter, load_tensors, save_tensors
from fxsplit.api.checkpoint_weights import check_model, make_room, read_model
from fxsplit.api.compiled import get_mode
from fxsplit.api.pipeline import Pipeline
from fxsplit.api.ranks import Team
from fxsplit.api.saving import Saving, wait_for_saving
from fxsplit.errors import FxsplitError, InputError
from fxsplit.formats.checkpoint_folder import (
    COSTS,
    MANIFEST,
    PLAN,
    Manifest,
    NewCheckpoint,
    list_checkpoints,
    make_token,
    read_manifest,
    remove_older,
)
from fxsplit.formats.plan_json import save_plan
from fxsplit.ir.facts.figures import is_count, show
from fxsplit.ir.interrupts import lose_no_interrupt
from fxsplit.runtime.ranks.agreement import hash_text
from fxsplit.runtime.ranks.holdings import Holdings
from fxsplit.torch_internals.undo import leave_no_trace

CPU = f"{RANDOM}cpu"


@dataclass(frozen=True)
class Restored:
    """What was loaded: the checkpoint's step, what was given as extra=, and its path."""

    step: int
    extra: dict[str, Any]
    path: Path


@lose_no_interrupt
@leave_no_trace
def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Saving:
    """Save a pipeline, or a model, with its optimizer as `folder/step-N`, while training goes on.

    All values are copied to host memory before this returns; a thread writes them. One checkpoint is written at a time:
    a second call waits for the first. `wait()` of what is returned waits for this one, and the end of the process does.
    The checkpoint is complete, or it is not there: a process that is killed leaves the one before as the latest.

    step: how many steps were made, a number that loading returns. extra: what else is to be kept, as JSON knows it,
    such as a scheduler's state_dict(). keep: how many of the newest checkpoints stay in the folder (default: all).

    Over ranks each rank of all pipelines calls this, and each writes what it has; all hosts share the folder. The state
    of torch's random numbers on the CPU is saved too, that of the first rank. Raises InputError for what no checkpoint
    holds, and what stopped the one before.
    """
    if not is_count(step):
        raise InputError(f"step={show(step)}: give how many steps were made, such as 7")
    if keep is not None and not is_count(keep, least=1):
        raise InputError(f"keep={show(keep)}: give how many checkpoints are to stay, such as 3, or None for all")
    if not isinstance(folder, (str, os.PathLike)):
        raise InputError(f"folder={show(folder)}: give the path of a folder")
    _get_model(model)
    what = f"saves to {os.fspath(folder)!r}"
    # Also the pipelines of a mesh that write nothing: groups of ranks are made by all of them, or by none.
    with _meet(model, f"save_checkpoint(step={step})", what, side_by_side=True) as holdings:
        # What is copied now takes the memory that the one before has until it is written.
        wait_for_saving()
        # Batches of a stream may write to buffers.
        with _keep_idle(model):
            staged, manifest = _stage(model, optimizer, step, dict(extra or {}))
            staged |= read_residuals(_get_model(model), _get_team(model))
        token = make_token() if holdings is None else holdings.tell(make_token(), "a checkpoint")
        group = None if holdings is None else holdings.find_group()
    # Generators of ranks are alike, or each rank has its own reasons.
    if holdings is None or holdings.leads:
        staged[CPU] = torch.get_rng_state()
    new = NewCheckpoint(Path(folder), step, token)
    complete = partial(_complete, new, manifest, _list_texts(model), keep)
    writer = FolderWriter(new, 1 if holdings is None else len(holdings), complete)
    write = partial(_write, new, partial(save_tensors, staged, writer, group))
    saving = Saving(new.path, write if holdings is None or holdings.writes else _leave_to_others)
    saving.start()
    if isinstance(model, Pipeline):
        model.saving = saving
    return saving


def _leave_to_others() -> None:
    """Write nothing: another pipeline with the same weights does."""


def _meet(
    model: nn.Module, call: str, what: str, *, side_by_side: bool = False
) -> AbstractContextManager[Holdings | None]:
    """Let all ranks of a pipeline do something together in the block; yields what they have of the model, or None."""
    team = _get_team(model)
    return nullcontext() if team is None else team.holdings.agree(call, what, side_by_side=side_by_side)


def _get_team(model: nn.Module) -> Team | None:
    """Return the ranks that run a pipeline, or None where this process does."""
    return model.compiler.team if isinstance(model, Pipeline) else None


def _stage(
    model: nn.Module, optimizer: Optimizer | None, step: int, extra: dict[str, Any]
) -> tuple[dict[str, Tensor], Manifest]:
    """Return copies in host memory of all that this process saves, and what the checkpoint says of itself."""
    own, team = _get_model(model), _get_team(model)
    state = read_model(own)
    groups, kept = ([], {}) if optimizer is None else read_optimizer(own, optimizer)
    manifest = Manifest(
        step,
        files=[],
        tied=state.tied,
        optimizer=None if optimizer is None else type(optimizer).__name__,
        groups=groups,
        extra=extra,
        gradient_hook=None if team is None else team.summing.kept_hook,
        versions={"torch": torch.__version__, "python": platform.python_version()},
    )
    # What JSON has no words for is refused here, and not in the thread.
    manifest.to_text()
    named = {f"{MODEL}{name}": weight.detach() for name, weight in state.own.items()} | kept
    return {name: _copy_to_host(value) for name, value in named.items()}, manifest


def _copy_to_host(value: Tensor) -> Tensor:
    """Return a copy in host memory, which later steps do not write to."""
    return value.clone() if value.device.type == "cpu" else value.cpu()


def _get_model(model: nn.Module) -> nn.Module:
    """Return the user's model."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: give a pipeline, or a torch.nn.Module")
    return model.model if isinstance(model, Pipeline) else model


def _list_places(model: nn.Module) -> dict[int, torch.device]:
    """Return the device of each weight of a pipeline that is compiled, by its identity."""
    if not isinstance(model, Pipeline):
        return {}
    compiled = model.compiler.get_compiled(get_mode(model.model))
    return {} if compiled is None else {id(weight): device for weight, device in compiled.program.list_placed()}


def _list_texts(model: nn.Module) -> list[Callable[[Path], None]]:
    """Return what writes the plan and the profile of a pipeline beside its weights."""
    if not isinstance(model, Pipeline):
        return []
    found: list[Callable[[Path], None]] = []
    try:
        plan, costs = model.plan, model.costs
    except InputError:  # nothing is compiled yet, or nothing was measured
        return found
    return [lambda to: save_plan(plan, to / PLAN), lambda to: costs.save(to / COSTS)]


def _write(new: NewCheckpoint, save: Callable[[], None]) -> None:
    """Write a checkpoint; what was written of one that fails is removed."""
    try:
        save()
    except BaseException as error:
        new.abandon()
        raise _unwrap(error) from error


def _unwrap(error: BaseException) -> BaseException:
    """Return the error of fxsplit's own that torch has wrapped, if there is one."""
    failures = getattr(error, "failures", {})
    return next((e for e, _ in failures.values() if isinstance(e, (FxsplitError, OSError))), error)


def _complete(
    new: NewCheckpoint,
    manifest: Manifest,
    texts: list[Callable[[Path], None]],
    keep: int | None,
    files: list[str],
) -> None:
    """Write what is beside the tensors, and put the checkpoint in its place."""
    for write in texts:
        write(new.beside)
    new.complete(replace(manifest, files=files))
    new.clear_others()
    if keep is not None:
        remove_older(new.path.parent, keep)


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in a folder, by its step; None where there is none."""
    if not isinstance(folder, (str, os.PathLike)):
        raise InputError(f"folder={show(folder)}: give the path of a folder")
    return next(reversed(list_checkpoints(folder)), None)


@lose_no_interrupt
@leave_no_trace
def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, *, random_state: bool = True
) -> Restored:
    """Load a checkpoint into a pipeline, or a model, and its optimizer; return its step and what was kept as extra=.

    path: a checkpoint, or a folder of them, of which the latest is loaded. Parameters stay the same objects. The
    optimizer is one of the kind that was saved, with the same parameters: it takes over what was kept of each, and the
    options of its groups, such as lr, but for those that say how to compute, as fused. random_state: whether torch's
    random numbers on the CPU go on as they would have.

    Over ranks every rank calls this, and reads what it has. Raises InputError, before anything changes, for a folder
    without a complete checkpoint, and where model or optimizer are not as they were.
    """
    found = _find(path)
    own = _get_model(model)
    manifest = read_manifest(found)
    goal = f"loads {found.name} with a manifest of hash {hash_text(manifest.to_text()):x}"
    with _meet(model, "load_checkpoint()", goal, side_by_side=True), _keep_idle(model):
        reader = FolderReader(found, manifest.files)
        state = read_model(own, filled=False)
        where = repr(str(found))
        stored = check_model(state, reader.kinds, manifest.tied, where)
        plan = None if optimizer is None else plan_optimizer(own, optimizer, manifest, reader.kinds, where)
        trains, team = optimizer is not None, _get_team(model)
        left = plan_residuals(own, team, reader, manifest.gradient_hook, where, trains=trains)
        names = [*(plan.values if plan else ()), *left.values, *([CPU] if CPU in reader.kinds else ())]
        values = reader.read_all(names)
        make_room(state, _list_places(model))
        targets = {f"{MODEL}{stored[name]}": weight.detach() for name, weight in state.own.items()}
        with torch.no_grad():
            load_tensors(targets | (plan.make_targets() if plan else {}), reader)
        if optimizer is not None and plan is not None:
            give_optimizer(own, optimizer, plan, values)
        give_residuals(own, team, left, values)
    if random_state and CPU in values:
        torch.set_rng_state(values[CPU])
    return Restored(manifest.step, manifest.extra, found)


def _keep_idle(model: nn.Module) -> AbstractContextManager[None]:
    """Return a block in which no batch of a pipeline runs, after waiting for those that are under way."""
    return model.keep_idle() if isinstance(model, Pipeline) else nullcontext()


def _find(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint that a path means; raises InputError where there is none."""
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"path={show(path)}: give the path of a checkpoint, or of a folder of them")
    given = Path(path)
    found = given if (given / MANIFEST).is_file() else latest_checkpoint(given)
    if found is None:
        raise InputError(
            f"there is no complete checkpoint in {str(given)!r}: latest_checkpoint() returns None for such a folder"
        )
    return found
