"""How a checkpoint's tensors become a model's weights: by name, or by the rules of transformers.

transformers 5 joins what its checkpoints hold apart. The weights of a layer's experts are one parameter of the model,
and two or three tensors for each expert in the files. transformers keeps a table of such rules; this module asks it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Read = Callable[[str], Tensor]
"""Returns the tensor of a name in the files."""


@dataclass(frozen=True)
class Recipe:
    """How weights are made of stored tensors: `make` gets a function that reads one, and returns weights by name.

    target: the name of the weight; some rules make several, of which it is the first.
    sources: the names of these tensors in the files.
    whole: whether the weight is one tensor of the files as it is.
    """

    target: str
    sources: tuple[str, ...]
    make: Callable[[Read], dict[str, Tensor]]
    whole: bool = False


def list_recipes(model: nn.Module, stored: Collection[str], names: Collection[str]) -> list[Recipe]:
    """Return how the tensors of these stored names become weights of the model, whose `state_dict` has `names`.

    A tensor that no rule is for keeps its name.
    """
    other = [name for name in stored if name not in names]
    rules = _find_rules(model) if other else None
    made = [] if rules is None else _apply(model, rules, sorted(other), dict.fromkeys(names, True))
    ruled = {source for recipe in made for source in recipe.sources}
    return [*(_take(name, name) for name in stored if name not in ruled), *made]


def _take(source: str, target: str) -> Recipe:
    """Return the recipe of a weight that is one tensor of the files."""
    return Recipe(target, (source,), lambda read: {target: read(source)}, whole=True)


def _find_rules(model: nn.Module) -> Any:
    """Return transformers' table of how it stores a model of its own; None for other models, and for other versions."""
    # Nobody has a model of a module that is not imported. To import it takes seconds, and may fail where a package that
    # it wants is broken.
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if not isinstance(kind, type) or not isinstance(model, kind):
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before version 5, models were made of what is stored
        return None
    found: Any = get_model_conversion_mapping
    return found(model)


def _apply(model: Any, rules: Any, stored: Collection[str], names: Mapping[str, bool]) -> list[Recipe]:
    """Return the recipes of those stored tensors that a rule turns into weights of the model."""
    from transformers import core_model_loading as loading

    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    parts: dict[str, list[tuple[str, str]]] = {}
    made = []
    # Experts in the order of their numbers: "10" comes after "9".
    for source in sorted(stored, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(source, renamings, converters, model.base_model_prefix, dict(names))
        if target not in names:
            continue
        if pattern is None:
            made.append(_take(source, target))
        else:
            parts.setdefault(target, []).append((source, pattern))
    for target, sources in parts.items():
        made.append(_convert(model, target, sources, of_pattern[sources[0][1]]))
    return made


def _convert(model: Any, target: str, sources: list[tuple[str, str]], rule: Any) -> Recipe:
    """Return the recipe that follows a rule of transformers; `sources` are stored names with the pattern of each."""

    def make(read: Read) -> dict[str, Tensor]:
        converter = copy.deepcopy(rule)
        for source, pattern in sources:
            # Read when the rule comes to it.
            converter.add_tensor(target, source, pattern, lambda source=source: read(source))
        found = converter.convert(target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}

    return Recipe(target, tuple(source for source, _ in sources), make)
