"""Read the state of an optimizer for a checkpoint, and load it, under the names of the parameters.

The names let a process that has another part of the model find its part of the state. On several ranks each rank saves
the options of all groups, and the state of its own parameters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxsplit.api.checkpoint.storage import JSON, OPTIMIZER, TYPED, FolderReader, name_kind
from fxsplit.api.checkpoint.weights import check_plain
from fxsplit.errors import InputError
from fxsplit.formats.weights.checkpoint_folder import Group, Manifest
from fxsplit.formats.weights.typed_json import decode, encode
from fxsplit.runtime.ranks.world.agreement import hash_text
from fxsplit.system.figures import show
from fxsplit.torch_internals.distributed.remote_tensors import is_remote

OF_THE_MACHINE = {"foreach", "fused", "capturable", "differentiable"}
"""Options that say how to compute, but do not change the result. Loading leaves them as the optimizer has them."""

LIKE_THE_PARAMETER = {
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum", "prev",
    "step_size", "ax", "exp_inf",
}  # fmt: skip
"""Names of state in torch's own optimizers that has the shape of its parameter."""


def name_parameters(model: nn.Module) -> dict[int, str]:
    """Return the first name of each parameter, by the id() of the parameter."""
    found: dict[int, str] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(weight), name)
    return found


def describe_groups(model: nn.Module, optimizer: Optimizer | None) -> str:
    """Return a text about an optimizer's parameters. All ranks get the same text if they have the same parameters.

    Raises InputError for an optimizer that keeps the state of a parameter only on some of its ranks.
    """
    if optimizer is None:
        return "no optimizer"
    if hasattr(optimizer, "consolidate_state_dict"):
        raise InputError(
            f"{type(optimizer).__name__} keeps the state of a parameter on only one of its ranks, and one pipeline "
            "writes the checkpoint: save without the optimizer, call consolidate_state_dict() and save its own "
            "state_dict() separately; or train with the inner optimizer"
        )
    names = name_parameters(model)
    groups = [[names.get(id(weight), "") for weight in group["params"]] for group in optimizer.param_groups]
    sizes = " and ".join(str(len(group)) for group in groups)
    return f"{type(optimizer).__name__} of {sizes} parameters with names of hash {hash_text(json.dumps(groups)):x}"


def read_optimizer(model: nn.Module, optimizer: Optimizer) -> tuple[list[Group], dict[str, Tensor]]:
    """Return the groups of an optimizer, and its state for the parameters of this rank.

    State that is no tensor becomes JSON, as a tensor of bytes. Raises InputError for a parameter that the model does
    not have, and for state that JSON cannot hold.
    """
    names = name_parameters(model)
    groups, kept = [], dict[str, Tensor]()
    for group in optimizer.param_groups:
        found = [_name(names, weight) for weight in group["params"]]
        options = {key: _to_json(key, value) for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(Group(found, options))
        for name, weight in zip(found, group["params"], strict=True):
            if is_remote(weight):
                continue
            for key, value in optimizer.state.get(weight, {}).items():
                if not isinstance(key, str) or "." in key:
                    raise InputError(
                        f"{type(optimizer).__name__} keeps {key!r} of {name!r}: give it a name without dots"
                    )
                if isinstance(value, Tensor):
                    check_plain(f"{key} of {name}", value)
                    kept[f"{OPTIMIZER}{name}.{key}"] = value.detach()
                else:
                    tree, notes = encode(value, f"{key} of {name}")
                    text = json.dumps([tree, notes] if notes else tree).encode()
                    full = f"{TYPED if notes else JSON}{name}.{key}"
                    kept[full] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    _refuse_other_state(optimizer)
    return groups, kept


def _refuse_other_state(optimizer: Optimizer) -> None:
    """Raise InputError for state that belongs to no parameter of the optimizer's groups, and so has no name."""
    known = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    for key, kept in optimizer.state.items():
        if kept and id(key) not in known:
            what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else show(key)
            raise InputError(
                f"{type(optimizer).__name__} keeps {', '.join(map(repr, kept))} under {what}, which is in none of its "
                "groups, and a checkpoint holds only the state of parameters: keep it in a group, remove it from "
                "optimizer.state, or save it as extra="
            )


def _name(names: Mapping[int, str], weight: Tensor) -> str:
    """Return the name of an optimizer's parameter. Raises InputError if the model does not have the parameter."""
    if id(weight) not in names:
        raise InputError(
            f"the optimizer has a parameter of shape {tuple(weight.shape)} that the model does not have: give the "
            "optimizer of this model"
        )
    return names[id(weight)]


def _to_json(what: str, value: Any) -> Any:
    """Return an option of an optimizer as plain JSON. Raises InputError if JSON cannot hold it."""
    # A learning rate may be a tensor.
    tree, notes = encode(value.item() if isinstance(value, Tensor) and value.ndim == 0 else value, what)
    # Loading makes tuples again for options that are tuples in the optimizer.
    other = next((kind for _, kind in notes if kind != "tuple"), None)
    if other is not None:
        raise InputError(
            f"the optimizer has the option {what}={show(value)}, and JSON cannot hold a {other}: remove it"
        )
    return tree


@dataclass
class OptimizerPlan:
    """All that is to be loaded into an optimizer: tensors by full name, and other values by parameter and key.

    `options` are the new options of each group. `targets` is the memory that the tensors are read into.
    """

    tensors: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = field(default_factory=dict)
    """Full name -> a tensor of the stored shape and dtype, the parameter, and the parameter's group."""
    targets: dict[str, Tensor] = field(default_factory=dict)
    values: dict[tuple[str, str], Any] = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)

    def make_targets(self) -> dict[str, Tensor]:
        """Allocate memory for the tensors, on the present devices of their parameters, and return it by full name."""
        self.targets = {full: _make_target(full, *given) for full, given in self.tensors.items()}
        return self.targets


def plan_optimizer(
    model: nn.Module, optimizer: Optimizer, manifest: Manifest, reader: FolderReader, where: str
) -> OptimizerPlan:
    """Return what to load from a checkpoint into an optimizer. Nothing changes yet.

    Raises InputError for another class of optimizer, other parameters, groups or options, and for broken values. Every
    rank checks the values of all ranks, so that either all ranks refuse a checkpoint or none does.
    """
    kind = type(optimizer).__name__
    if manifest.optimizer != kind:
        raise InputError(
            f"{where} holds {manifest.optimizer or 'no optimizer'}, and {kind} is to be loaded: give the optimizer "
            "that it was saved with, or none"
        )
    names, plan = name_parameters(model), OptimizerPlan()
    group_of = {name: group for group in manifest.groups for name in group.parameters}
    by_weight: dict[str, tuple[Tensor, dict[str, Any]]] = {}
    for group in optimizer.param_groups:
        found = [_name(names, weight) for weight in group["params"]]
        options = _choose_options([_find(group_of, name, where) for name in found], found, where)
        _check_options(optimizer, group, options, manifest, where)
        plan.options.append(options)
        by_weight |= {name: (weight, group) for name, weight in zip(found, group["params"], strict=True)}
    _check_groups([[names[id(w)] for w in group["params"]] for group in optimizer.param_groups], manifest, where)
    values = _read_values(reader, where)
    for full, tensor in reader.kinds.items():
        if not full.startswith((OPTIMIZER, JSON, TYPED)):
            continue
        name, key = _split(full)
        if name not in by_weight:
            raise InputError(f"{where} holds {full!r}, and the optimizer had no such parameter: is it complete?")
        weight, group = by_weight[name]
        if full.startswith(OPTIMIZER) and type(optimizer).__module__.startswith("torch.optim."):
            _check_kind(full, key, tensor, weight, where)
        if is_remote(weight):
            continue
        if full in values:
            plan.values[name, key] = values[full]
        else:
            plan.tensors[full] = tensor, weight, group
    return plan


def _check_kind(full: str, key: str, tensor: Tensor, weight: Tensor, where: str) -> None:
    """Raise InputError for state of an unexpected shape or dtype in one of torch's own optimizers."""
    alike = tensor.shape == weight.shape and tensor.is_floating_point() == weight.is_floating_point()
    if key in LIKE_THE_PARAMETER and not alike:
        raise InputError(
            f"{full!r} is {name_kind(tensor)} in {where}, and its parameter is {name_kind(weight)}: is the checkpoint "
            "complete?"
        )


def _find(group_of: Mapping[str, Group], name: str, where: str) -> Group:
    """Return the group that a parameter had when the checkpoint was saved. Raises InputError if it was in no group."""
    if name not in group_of:
        raise InputError(
            f"{name!r} was in no group of the optimizer in {where}: give the optimizer the same parameters"
        )
    return group_of[name]


def _read_values(reader: FolderReader, where: str) -> dict[str, Any]:
    """Return the state that is not a tensor, by full name. Raises InputError for a value that is not valid JSON."""
    found: dict[str, Any] = {}
    for full, tensor in reader.read_all(n for n in reader.kinds if n.startswith((JSON, TYPED))).items():
        try:
            if tensor.dtype != torch.uint8 or tensor.ndim != 1:
                raise ValueError(f"it is {tensor.dtype} {tuple(tensor.shape)}, and no text")
            tree = json.loads(tensor.numpy().tobytes())
            found[full] = decode(*tree) if full.startswith(TYPED) else tree
        except (ValueError, TypeError, RecursionError) as error:
            raise InputError(f"{full!r} in {where} cannot be read as JSON: {error}") from error
    return found


def _choose_options(saved: list[Group], names: list[str], where: str) -> dict[str, Any]:
    """Return the saved options for one group of the optimizer, whose parameters were in the groups `saved`.

    Raises InputError if these groups had different options.
    """
    # Options are saved by group, and a parameter may have been in another group.
    for group, name in zip(saved, names, strict=True):
        if group.options != saved[0].options:
            raise InputError(
                f"{name!r} and {names[0]!r} are in one group of the optimizer, and had other options in {where}: make "
                "the groups as they were"
            )
    return saved[0].options if saved else {}


def _check_groups(own: list[list[str]], manifest: Manifest, where: str) -> None:
    """Raise InputError unless an optimizer divides its parameters into the groups of the checkpoint, in any order."""
    saved = [group.parameters for group in manifest.groups]
    known = {name for names in own for name in names}
    gone = next((name for names in saved for name in names if name not in known), None)
    if gone is not None:
        raise InputError(
            f"{gone!r} was in a group of the optimizer in {where}, and is in none now: give the optimizer the same "
            "parameters"
        )
    if sorted(map(sorted, own)) != sorted(map(sorted, saved)):
        raise InputError(
            f"the optimizer had {len(saved)} groups in {where}, of {[*map(len, saved)]} parameters, and has {len(own)} "
            f"now, of {[*map(len, own)]}: make the groups as they were"
        )


def _check_options(
    optimizer: Optimizer, group: Mapping[str, Any], saved: Mapping[str, Any], manifest: Manifest, where: str
) -> None:
    """Raise InputError if a saved option does not fit the optimizer, or if an option was not saved."""
    for key, value in saved.items():
        if key in OF_THE_MACHINE and key in group:
            continue
        if not _fits(group.get(key), value):
            raise InputError(
                f"the optimizer has {key}={show(group.get(key))}, and {where} holds {key}={show(value)}: give the "
                "optimizer that was saved, or load without it"
            )
    # Another version of torch may have other options.
    if not group["params"] or manifest.training is None or manifest.versions.get("torch") != torch.__version__:
        return
    missing = next((k for k in optimizer.defaults if k in group and k not in saved and k not in OF_THE_MACHINE), None)
    if missing is not None:
        raise InputError(f"{where} holds no {missing!r} of the optimizer: give the optimizer that was saved")


def _fits(own: Any, saved: Any) -> bool:
    """Return whether a saved option has the type of the optimizer's `own` option; anything fits if `own` is None."""
    if isinstance(own, Tensor):
        own = own.item() if own.ndim == 0 else own
    if isinstance(own, (tuple, list)):
        return isinstance(saved, list) and len(own) == len(saved) and all(map(_fits, own, saved))
    if isinstance(saved, float) and not math.isfinite(saved):
        return repr(own) == repr(saved)
    if isinstance(saved, list) and own is None:
        return all(_fits(None, value) for value in saved)
    if isinstance(own, bool) or own is None:
        return own is None or isinstance(saved, bool)
    if isinstance(own, (int, float)):
        return isinstance(saved, (int, float)) and not isinstance(saved, bool)
    return isinstance(saved, type(own))


def _make_target(full: str, kind: Tensor, weight: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return memory for one tensor of a parameter's state, on the device on which the optimizer needs it."""
    # As torch does in load_state_dict(): the number of steps is in host memory, unless a kernel reads it.
    on_host = full.endswith(".step") and not (group.get("fused") or group.get("capturable"))
    return torch.empty(kind.shape, dtype=kind.dtype, device="cpu" if on_host else weight.device)


def give_optimizer(model: nn.Module, optimizer: Optimizer, plan: OptimizerPlan) -> None:
    """Replace the state and the options of an optimizer by those of `plan`, which have been loaded."""
    found: dict[str, dict[str, Any]] = {}
    for (name, key), value in ({_split(full): target for full, target in plan.targets.items()} | plan.values).items():
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
    """Return the name of a parameter and the key of its state, which together make a full name."""
    name, _, key = full.partition(".")[2].rpartition(".")
    return name, key


def _like(before: Any, value: Any) -> Any:
    """Return a loaded option in the type of the option `before`: a tensor, or a tuple in place of JSON's list."""
    if isinstance(before, Tensor):
        return before.fill_(value) if before.ndim == 0 else before
    return tuple(value) if isinstance(before, tuple) else value
