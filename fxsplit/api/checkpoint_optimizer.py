"""What a checkpoint holds of an optimizer, by the names of the parameters.

A process with another part of the model so finds what it needs. On several ranks each has the options of all groups,
and what is kept of its own parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxsplit.api.checkpoint_storage import JSON, OPTIMIZER
from fxsplit.api.checkpoint_weights import check_plain
from fxsplit.errors import InputError
from fxsplit.formats.checkpoint_folder import Group, Manifest
from fxsplit.ir.facts.figures import show
from fxsplit.torch_internals.away import is_away

OF_THE_MACHINE = {"foreach", "fused", "capturable", "differentiable"}
"""Options of optimizers that say how to compute and not what: those of whoever loads stay."""


def name_parameters(model: nn.Module) -> dict[int, str]:
    """Return the first name of each parameter, by its identity."""
    found: dict[int, str] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(weight), name)
    return found


def read_optimizer(model: nn.Module, optimizer: Optimizer) -> tuple[list[Group], dict[str, Tensor]]:
    """Return the groups of an optimizer, and what it keeps of the parameters of this rank.

    Values that are no tensors are JSON, as bytes. Raises InputError for a parameter that is not the model's, and for a
    value that is no tensor and that JSON has no words for.
    """
    if hasattr(optimizer, "consolidate_state_dict"):
        raise InputError(
            f"{type(optimizer).__name__} keeps what it knows of a parameter on one of the ranks that have it, and a "
            "checkpoint is written by one pipeline: save without the optimizer, and its own state_dict() beside, after "
            "consolidate_state_dict(); or train with the optimizer that is inside"
        )
    names = name_parameters(model)
    groups, kept = [], dict[str, Tensor]()
    for group in optimizer.param_groups:
        found = [_name(names, weight) for weight in group["params"]]
        options = {key: _to_json(key, value) for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(Group(found, options))
        for name, weight in zip(found, group["params"], strict=True):
            if is_away(weight):
                continue
            for key, value in optimizer.state.get(weight, {}).items():
                if not isinstance(key, str) or "." in key:
                    raise InputError(
                        f"{type(optimizer).__name__} keeps {key!r} of {name!r}: a name without dots is wanted"
                    )
                if isinstance(value, Tensor):
                    check_plain(f"{key} of {name}", value)
                    kept[f"{OPTIMIZER}{name}.{key}"] = value.detach()
                else:
                    text = json.dumps(_to_json(f"{key} of {name}", value)).encode()
                    kept[f"{JSON}{name}.{key}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return groups, kept


def _name(names: Mapping[int, str], weight: Tensor) -> str:
    """Return the name of an optimizer's parameter."""
    if id(weight) not in names:
        raise InputError(
            f"the optimizer has a parameter of shape {tuple(weight.shape)} that the model does not have: save what "
            "belongs together"
        )
    return names[id(weight)]


def _to_json(what: str, value: Any) -> Any:
    """Return an option of an optimizer as JSON has it."""
    # A learning rate may be a tensor.
    plain = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
    try:
        json.dumps(plain)
    except (TypeError, ValueError) as error:
        raise InputError(f"the optimizer has {what}={show(value)}, which is neither a tensor nor JSON") from error
    return plain


@dataclass
class OptimizerPlan:
    """What is to be loaded into an optimizer: tensors to fill, and values to read, by their full names."""

    tensors: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = field(default_factory=dict)
    """What a tensor is like, the parameter that it is of, and the group of that."""
    targets: dict[str, Tensor] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)

    def make_targets(self) -> dict[str, Tensor]:
        """Return memory for the tensors, on the devices that their parameters are on now."""
        self.targets = {full: _make_target(full, *given) for full, given in self.tensors.items()}
        return self.targets


def plan_optimizer(
    model: nn.Module, optimizer: Optimizer, manifest: Manifest, kinds: Mapping[str, Tensor], where: str
) -> OptimizerPlan:
    """Return what is to be loaded into an optimizer; nothing has changed yet.

    Raises InputError for a checkpoint of another kind of optimizer, or of other parameters.
    """
    kind = type(optimizer).__name__
    if manifest.optimizer != kind:
        raise InputError(
            f"{where} holds {manifest.optimizer or 'no optimizer'}, and {kind} is to be loaded: give the optimizer "
            "that it was saved with, or none"
        )
    names, plan = name_parameters(model), OptimizerPlan()
    group_of = {name: group for group in manifest.groups for name in group.parameters}
    by_weight = _list_by_weight(kinds)
    for group in optimizer.param_groups:
        found = [_name(names, weight) for weight in group["params"]]
        saved = [_find(group_of, name, where) for name in found]
        plan.options.append(_choose_options(saved, found, where))
        for name, weight in zip(found, group["params"], strict=True):
            if is_away(weight):
                continue
            for full in by_weight.get(name, ()):
                if full.startswith(JSON):
                    plan.values.append(full)
                else:
                    plan.tensors[full] = kinds[full], weight, group
    return plan


def _find(group_of: Mapping[str, Group], name: str, where: str) -> Group:
    """Return the group in a checkpoint that a parameter was in."""
    if name not in group_of:
        raise InputError(
            f"{name!r} was in no group of the optimizer in {where}: give the optimizer the same parameters"
        )
    return group_of[name]


def _list_by_weight(kinds: Iterable[str]) -> dict[str, list[str]]:
    """Return the full names of what an optimizer keeps, by the name of the parameter."""
    found: dict[str, list[str]] = {}
    for full in kinds:
        if full.startswith((OPTIMIZER, JSON)):
            found.setdefault(_split(full)[0], []).append(full)
    return found


def _choose_options(saved: list[Group], names: list[str], where: str) -> dict[str, Any]:
    """Return the options for a group, which are those that its parameters had."""
    # Options are of groups, and a parameter may have been in another one.
    for group, name in zip(saved, names, strict=True):
        if group.options != saved[0].options:
            raise InputError(
                f"{name!r} and {names[0]!r} are in one group of the optimizer, and had other options in {where}: make "
                "the groups as they were"
            )
    return saved[0].options if saved else {}


def _make_target(full: str, kind: Tensor, weight: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return memory for what an optimizer keeps of a parameter."""
    # As torch has it where a state is loaded: the number of steps is on the host, unless a kernel reads it.
    on_host = full.endswith(".step") and not (group.get("fused") or group.get("capturable"))
    return torch.empty(kind.shape, dtype=kind.dtype, device="cpu" if on_host else weight.device)


def give_optimizer(model: nn.Module, optimizer: Optimizer, plan: OptimizerPlan, values: Mapping[str, Tensor]) -> None:
    """Let an optimizer have what was loaded; what it kept before is gone."""
    found: dict[str, dict[str, Any]] = {}
    for full in (*plan.targets, *plan.values):
        name, key = _split(full)
        value: Any = plan.targets.get(full)
        if value is None:
            value = json.loads(values[full].numpy().tobytes())
        found.setdefault(name, {})[key] = value
    named = name_parameters(model)
    optimizer.state.clear()
    for group, options in zip(optimizer.param_groups, plan.options, strict=True):
        for key, value in options.items():
            if key not in OF_THE_MACHINE or key not in group:
                group[key] = _like(group.get(key), value)
        for weight in group["params"]:
            if named[id(weight)] in found:
                optimizer.state[weight] = found[named[id(weight)]]


def _split(full: str) -> tuple[str, str]:
    """Return the name of a parameter, and of what an optimizer keeps of it."""
    name, _, key = full.partition(".")[2].rpartition(".")
    return name, key


def _like(before: Any, value: Any) -> Any:
    """Return an option as the optimizer has it: a tensor, or a tuple where JSON knows lists."""
    if isinstance(before, Tensor):
        return before.fill_(value) if before.ndim == 0 else before
    return tuple(value) if isinstance(before, tuple) else value
