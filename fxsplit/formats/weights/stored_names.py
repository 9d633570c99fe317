"""Find out how a model's weights are made from a checkpoint's tensors: by name, or by the rules of transformers.

transformers 5 joins tensors that its checkpoints store separately: the weights of a layer's experts are one parameter
of the model, but two or three tensors for each expert in the files. This module reads transformers' table of such
rules.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Read = Callable[[str], Tensor]
"""A function that reads the tensor of a given name from the files."""


@dataclass(frozen=True)
class Recipe:
    """How to make weights from stored tensors.

    `make` takes a function that reads a tensor, and returns weights by name.
    - target: the name of the weight; of the first weight if a rule makes several
    - sources: the names of the stored tensors
    - whole: the weight is one stored tensor, unchanged
    """

    target: str
    sources: tuple[str, ...]
    make: Callable[[Read], dict[str, Tensor]]
    whole: bool = False


def list_recipes(model: nn.Module, stored: Collection[str], names: Collection[str]) -> list[Recipe]:
    """Return recipes that make weights of the model from the tensors `stored`; `names` are its state_dict keys.

    The weight of a tensor without a rule has the tensor's name.
    """
    other = [name for name in stored if name not in names]
    rules = _find_rules(model) if other else None
    made = [] if rules is None else _apply(model, rules, sorted(other), dict.fromkeys(names, True))
    ruled = {source for recipe in made for source in recipe.sources}
    return [*(_take(name, name) for name in stored if name not in ruled), *made]


def _take(source: str, target: str) -> Recipe:
    """Return the recipe of a weight that is one stored tensor."""
    return Recipe(target, (source,), lambda read: {target: read(source)}, whole=True)


def _find_rules(model: nn.Module) -> Any:
    """Return transformers' conversion rules for the model; None for other models, and for versions before 5."""
    # If transformers is not imported, the model is not of transformers. Importing it takes seconds, and may fail
    # because of a broken dependency.
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if not isinstance(kind, type) or not isinstance(model, kind):
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before version 5, parameters matched the stored tensors
        return None
    found: Any = get_model_conversion_mapping
    return found(model)


def _apply(model: Any, rules: Any, stored: Collection[str], names: Mapping[str, bool]) -> list[Recipe]:
    """Return the recipes for the stored tensors that `rules` turn into weights of the model, which has `names`."""
    from transformers import core_model_loading as loading

    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    parts: dict[str, list[tuple[str, str]]] = {}
    made = []
    # Natural order of experts: "10" after "9".
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
    """Return the recipe that applies `rule` of transformers.

    `sources`: pairs of a stored name and the pattern it matched.
    """

    def make(read: Read) -> dict[str, Tensor]:
        converter = copy.deepcopy(rule)
        for source, pattern in sources:
            # Read lazily, when the rule needs the tensor.
            converter.add_tensor(target, source, pattern, lambda source=source: read(source))
        found = converter.convert(target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}

    return Recipe(target, tuple(source for source, _ in sources), make)
