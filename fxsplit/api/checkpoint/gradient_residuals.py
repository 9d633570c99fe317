"""Save and load the residuals of gradient hooks: the parts of gradients that a hook has left out so far.

They are saved by the names of parameters. Each pipeline of a mesh has its own residuals, so a parameter has one saved
tensor for each pipeline.

  saved by 2 pipelines:    residual.0.weight, residual.1.weight
  loaded by 2 pipelines:   each rank gets its own again
  loaded by 3 pipelines:   each rank gets the mean of the saved tensors, so the mean over pipelines stays the same
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fxsplit.api.checkpoint.optimizer import name_parameters
from fxsplit.api.checkpoint.storage import RESIDUAL, FolderReader
from fxsplit.api.compiler.compile_group import CompileGroup
from fxsplit.errors import FxsplitWarning, InputError
from fxsplit.runtime.ranks.hooks.error_feedback import ErrorFeedback
from fxsplit.runtime.ranks.hooks.power_errors import PowerErrors
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals.distributed.remote_tensors import is_remote

WHAT = "residuals of gradient hooks"


def read_residuals(model: nn.Module, compile_group: CompileGroup | None) -> dict[str, Tensor]:
    """Return the residuals of this rank's parameters, for all pipelines of a mesh.

    All ranks of all pipelines call this. Only the ranks of the first pipeline, which writes the residuals, get a
    result; the others get an empty dict.
    """
    residuals = _find_residuals(compile_group)
    if compile_group is None or residuals is None:
        return {}
    data_parallel, found = compile_group.reduction.data_parallel, dict[str, Tensor]()
    for name, weight in _list_own(model):
        if not residuals.has(weight):
            continue
        # As bytes: gloo does not support all dtypes.
        own = residuals.get(weight).detach().contiguous().cpu()
        gathered = data_parallel.gather(own.view(-1).view(torch.uint8), WHAT)
        if data_parallel.row == 0:
            found |= {f"{RESIDUAL}{row}.{name}": t.view(own.dtype).view(own.shape) for row, t in enumerate(gathered)}
    return found


@dataclass(frozen=True)
class ResidualPlan:
    """The residuals to load. `names`: for each parameter of this rank, the full names of the tensors to average.

    `divisor`: the number of pipelines whose residuals are averaged.
    """

    names: Mapping[str, list[str]]
    divisor: int = 1

    @property
    def values(self) -> list[str]:
        """The full names of all tensors to read."""
        return [full for names in self.names.values() for full in names]


def plan_residuals(
    model: nn.Module,
    compile_group: CompileGroup | None,
    reader: FolderReader,
    hook: str | None,
    where: str,
    *,
    trains: bool,
) -> ResidualPlan:
    """Return which residuals to load into the hook of a pipeline. Nothing changes yet.

    hook: the text of the hook that the checkpoint was saved with.
    trains: whether an optimizer is loaded too, so that training goes on. Then a warning tells of residuals that are
        lost.
    Raises InputError for a tensor whose shape or dtype is not its parameter's.
    """
    rows = _list_rows(reader)
    residuals, own_hook = (
        _find_residuals(compile_group),
        None if compile_group is None else compile_group.reduction.kept_hook,
    )
    if residuals is None or compile_group is None:
        if rows and trains:
            _warn(f"{where} holds {WHAT} ({hook}), which are not loaded here: gradient_hook={own_hook!r}")
        elif own_hook is not None and trains:
            _warn(f"gradient_hook={own_hook!r} starts afresh: checkpoints do not hold its state from step to step")
        return ResidualPlan({})
    kinds, count, data_parallel = reader.kinds, len(rows), compile_group.reduction.data_parallel
    chosen = [data_parallel.row] if count == data_parallel.n_pipelines else sorted(rows)
    names = {}
    for name, weight in _list_own(model):
        full = [text for row in chosen if (text := f"{RESIDUAL}{row}.{name}") in kinds]
        for one in full:
            if (kinds[one].dtype, kinds[one].shape) != (weight.dtype, weight.shape):
                raise InputError(
                    f"{one!r} in {where} has another shape or dtype than {name!r}: build the model as the "
                    "checkpoint's was"
                )
        names[name] = full
    return ResidualPlan(names, len(chosen))


def give_residuals(
    model: nn.Module, compile_group: CompileGroup | None, plan: ResidualPlan, values: Mapping[str, Tensor]
) -> None:
    """Replace the residuals of the hook by the loaded `values`, as `plan` says."""
    residuals = _find_residuals(compile_group)
    if residuals is None:
        return
    residuals.clear()
    for name, weight in _list_own(model):
        if plan.names.get(name):
            left = sum((values[full] for full in plan.names[name]), torch.zeros(()).to(weight.dtype))
            residuals.put(weight, (left / plan.divisor).to(weight.device))


def _warn(text: str) -> None:
    warn_user(text, FxsplitWarning)


def _find_residuals(compile_group: CompileGroup | None) -> ErrorFeedback | PowerErrors | None:
    """Return the object that holds this rank's residuals; None for a single pipeline, or a hook that keeps none."""
    if compile_group is None or compile_group.reduction.data_parallel.n_pipelines == 1:
        return None
    return compile_group.reduction.data_parallel.reducer.left_out


def _list_own(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters of this rank with their first names, in the model's order."""
    names = name_parameters(model)
    return [(names[id(weight)], weight) for weight in model.parameters() if not is_remote(weight)]


def _list_rows(reader: FolderReader) -> set[int]:
    """Return the numbers of the pipelines that have residuals in a checkpoint."""
    found = set()
    for full in reader.kinds:
        if full.startswith(RESIDUAL):
            row = full.removeprefix(RESIDUAL).partition(".")[0]
            if not row.isdigit():
                raise InputError(f"the checkpoint holds {full!r}, which names no pipeline")
            found.add(int(row))
    return found
