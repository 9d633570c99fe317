"""Borders: the modules that a cut may lie between, and not inside of, where cuts are to lie at borders of modules.

These are the model's own parts: each submodule at its top, and each part of a list of submodules there. A transformer
has `embed`, `layers.0`, `layers.1` and `head`, for example.
"""

from __future__ import annotations

from dataclasses import replace

from fxsplit.errors import PlanError, ProfileError
from fxsplit.ir.facts.costs import Costs, NodeCost

PLACES = ("anywhere", "modules")
"""Where cuts may lie."""


def find_module(node: NodeCost) -> str:
    """Return which of the model's own parts a node is in; empty for what the model's own forward() computes."""
    # A node that fetches a weight has the weight's path, whose last part is no module.
    path = node.module.rpartition(".")[0] if node.op.startswith("get_attr") else node.module
    first, _, rest = path.partition(".")
    number = rest.partition(".")[0]
    # Parts of lists are numbered, and those of dicts are called as they are.
    return f"{first}.{number}" if number.isdecimal() else first


def list_modules(costs: Costs) -> dict[str, tuple[str, ...]]:
    """Return the nodes of each of the model's own parts, in the order in which they are first called."""
    # A module that is called twice stands where it is called first.
    found: dict[str, list[str]] = {}
    for node in costs.nodes:
        module = find_module(node)
        if module:
            found.setdefault(module, []).append(node.name)
    return {module: tuple(names) for module, names in found.items()}


def compress_cuts(costs: Costs, how: str) -> Costs:
    """Return costs that price what crosses cuts as it is sent; raises ProfileError where nobody knows dtypes."""
    if how and not any(node.made for node in costs.nodes):
        raise ProfileError(
            f"the profile does not say which dtypes and shapes nodes make, which compress={how!r} asks for: profile "
            "the model again"
        )
    return replace(costs, compress=how)


def check_modules(costs: Costs, n_stages: int) -> None:
    """Raise PlanError for a model with fewer modules, at whose borders it can be cut, than there are to be stages."""
    modules = list_modules(costs)
    if len(modules) < n_stages:
        raise PlanError(
            f"the model has {len(modules)} modules at whose borders it can be cut ({', '.join(modules) or 'none'}), "
            f"too few for {n_stages} stages: plan for fewer devices, or let cuts lie anywhere"
        )
