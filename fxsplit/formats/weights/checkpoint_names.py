"""Check the tensor names of a checkpoint against a model: missing weights, and tensors that the model lacks."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path

from torch import Tensor, nn

from fxsplit.errors import InputError
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals.autograd.leaves import list_gradient_hooks

NAMED = 8
"""The most tensors that a warning lists by name."""


class Extra(Enum):
    """What to do about a tensor of a checkpoint that the model does not have: refuse it, warn, or ignore it."""

    REFUSE = "refuse"
    WARN = "warn"
    IGNORE = "ignore"


def name_weights(state: Mapping[str, Tensor]) -> dict[int, list[str]]:
    """Return the names of each tensor of a state_dict, by the id() of the tensor.

    A tied weight is one object with several names. A file may use one of them or all.
    """
    names: dict[int, list[str]] = {}
    for name, weight in state.items():
        names.setdefault(id(weight), []).append(name)
    return names


def check_names(model: nn.Module, state: Mapping[str, Tensor], held: Collection[str], extra: Extra, path: Path) -> None:
    """Raise InputError unless the files hold a tensor for each weight of the model.

    - `held`: the names of tensors in the files, as the model names them
    - `state`: the model's state_dict. A buffer that the model permits to be missing keeps its value
    - `extra`: what to do about a tensor that the model neither has nor ignores
    """
    # A state_dict() hook may add tensors that no file can be loaded into.
    held_by_model = {id(w) for w in (*model.parameters(), *model.buffers())}
    made = next((name for name, w in state.items() if id(w) not in held_by_model), None)
    if made is not None:
        raise InputError(
            f"state_dict() of {type(model).__name__} makes {made!r}, which is none of its parameters or buffers: load "
            "such a checkpoint with load_state_dict()"
        )
    names = name_weights(state)
    missing = [known[0] for known in names.values() if not any(name in held for name in known)]
    missing = [name for name in missing if not _may_lack(model, name, state[name])]
    if missing:
        raise InputError(
            f"{str(path)!r} lacks {len(missing)} of the {len(names)} weights of {type(model).__name__}, such as "
            f"{missing[0]!r} (it has {next(iter(held), 'none')!r}): give the checkpoint of this model, by its own names"
        )
    if extra is not Extra.IGNORE:
        _report_extra(model, _list_unasked(model, held - state.keys()), extra, path)
    # Non-persistent buffers are in no checkpoint, so they must have values already.
    named = [*model.named_parameters(), *model.named_buffers()]
    lost = next((name for name, w in named if w.is_meta and id(w) not in names), None)
    if lost is not None:
        raise InputError(
            f"{lost!r} is on the meta device, and no checkpoint can hold it, as it is not persistent: build the model "
            "inside fxsplit.without_weights(), which makes parameters on the meta device and computes buffers"
        )


def _report_extra(model: nn.Module, names: Sequence[str], extra: Extra, path: Path) -> None:
    """Raise InputError or warn, as `extra` says, if the checkpoint has tensors `names` that the model lacks."""
    kind = type(model).__name__
    if names and extra is Extra.REFUSE:
        raise InputError(
            f"{str(path)!r} holds {len(names)} tensors that {kind} does not have, such as "
            f"{names[0]!r}: give its own checkpoint, or pipe.load_weights(path, strict=False) to leave them out"
        )
    if names:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        warn_user(
            f"{str(path)!r} holds {len(names)} tensors that {kind} does not have, and which are left out: "
            f"{', '.join(map(repr, names[:NAMED]))}{more}. If it should have them, build the model like the "
            "checkpoint's"
        )


def _list_unasked(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the sorted names of extra tensors, without those that the model ignores.

    A transformers model has patterns of names that it ignores. It also ignores buffers that it computes itself, which
    earlier versions saved.
    """
    patterns = [re.compile(text) for text in _read_patterns(model, "_keys_to_ignore_on_load_unexpected")]
    saved = model.state_dict(keep_vars=True).keys()
    computed = {name for name, _ in model.named_buffers(remove_duplicate=False) if name not in saved}
    # Earlier versions of transformers had the buffers of rotary embeddings in each layer.
    ends = {name.rpartition(".")[2] for name in computed} if _is_of_transformers(model) else set()
    return sorted(
        name
        for name in names
        if not (name in computed or name.rpartition(".")[2] in ends or any(p.search(name) for p in patterns))
    )


def _may_lack(model: nn.Module, name: str, weight: Tensor) -> bool:
    """Return whether a checkpoint may lack a weight: it is a buffer with values that the model says is optional."""
    if weight.is_meta or isinstance(weight, nn.Parameter):
        return False
    return any(re.search(text, name) for text in _read_patterns(model, "_keys_to_ignore_on_load_missing"))


def _read_patterns(model: nn.Module, attribute: str) -> list[str]:
    """Return the regular expressions in an attribute of a transformers model; an empty list for other models."""
    found = getattr(model, attribute, None) if _is_of_transformers(model) else None
    return sorted(text for text in found or () if isinstance(text, str))


def _is_of_transformers(model: nn.Module) -> bool:
    # If transformers is not imported, the model is not of transformers. Importing it takes seconds, and may fail
    # because of a broken dependency.
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return isinstance(kind, type) and isinstance(model, kind)


def check_free(name: str, weight: Tensor) -> None:
    """Raise InputError for a weight without values if loading it could break something that refers to it.

    Loading exchanges the tensor behind the Python object, but an autograd graph would go on reading the old one.
    """
    if not weight.is_meta:
        return
    if any(list_gradient_hooks(weight)):
        raise InputError(f"{name!r} has gradient hooks and no values yet: register hooks after its weights are loaded")
    # Weak references, like those of a pipeline over ranks to its parameters, refer to the Python object.
    if weight._use_count() > 1:  # type: ignore[attr-defined]
        raise InputError(
            f"{name!r} has no values yet, and a weak reference or an autograd graph holds on to it: drop that first"
        )
