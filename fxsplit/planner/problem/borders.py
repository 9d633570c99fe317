"""Borders: the modules that a cut may lie between, and not inside of, where cuts are to lie at borders of modules.

`modules` are the model's own parts: each submodule at its top, and each part of a list of submodules there. For
example, a transformer has `embed`, `layers.0`, `layers.1` and `head`. `modules=2` are their parts in turn, one level
further down. A pattern of paths, such as `model.layers.*`, is for the modules that match it; what lies between two of
them stays whole too, so that cuts lie exactly at the borders of these modules.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from fxsplit.errors import PlanError, ProfileError
from fxsplit.ir.facts.costs.costs import Costs, NodeCost
from fxsplit.system.figures import SHOWN

ANYWHERE = "anywhere"
FORMS = "anywhere, modules, modules=2 (a depth), or a pattern of paths such as model.layers.*"
"""How to say where cuts may lie."""
BETWEEN = "between "
"""How names of what lies between modules begin; modules are named by words with dots, so that none of theirs does."""
MOST_NAMED = 8
"""How many modules an error names."""


def check_place(at: str) -> None:
    """Raise ValueError, with the forms that there are, for a text that does not say where cuts may lie."""
    depth = at.removeprefix("modules=")
    named = depth != at and depth.isdecimal() and 1 <= len(depth) <= 2 and int(depth) >= 1
    # Letters of any alphabet name modules in Python.
    if not named and re.fullmatch(r"[\w*?]+(\.[\w*?]+)*", at) is None:
        raise ValueError(f"give {FORMS}")


def find_module(node: NodeCost, depth: int = 1) -> str:
    """Return which of the model's own parts a node is in; empty for what the model's own forward() computes.

    depth: 1 for the parts at the top of the model, 2 for the parts of these, and so on.
    """
    parts: list[str] = []
    for part in filter(None, node.owner.split(".")):
        # Parts of lists are numbered, and those of dicts are called as they are.
        if part.isdecimal() and parts and "." not in parts[-1]:
            parts[-1] += f".{part}"
        else:
            parts.append(part)
    return ".".join(parts[:depth])


def list_modules(costs: Costs, depth: int = 1) -> dict[str, tuple[str, ...]]:
    """Return the nodes of each of the model's own parts, in the order in which they are first called.

    What a module with parts of its own computes itself is in none of them, as what the model's forward() computes.
    """
    found = {node.name: find_module(node, depth) for node in costs.nodes}
    divided = {module[:at] for module in found.values() for at, letter in enumerate(module) if letter == "."}
    return _group({name: module for name, module in found.items() if module not in divided})


def list_wholes(costs: Costs, at: str) -> dict[str, tuple[str, ...]]:
    """Return the nodes of each part that no cut is to part, in the order in which they are first called.

    at: where cuts may lie, as `check_place` takes it; of a pattern, what lies between two modules is such a part too.

    Raises PlanError for a pattern that no module matches.
    """
    if at == ANYWHERE:
        return {}
    if at == "modules" or at.startswith("modules="):
        return list_modules(costs, int(at.partition("=")[2] or 1))
    found = {node.name: _match(node.owner, at) for node in costs.nodes}
    if not any(found.values()):
        raise PlanError(f"no module matches {at[:SHOWN]!r}: {_suggest(costs, at)}")
    return _group(found | _name_between(costs, found))


def _match(path: str, pattern: str) -> str:
    """Return the path of the module that matches a pattern and that `path` is in; empty if none does."""
    parts, wanted = path.split("."), pattern.split(".")
    fits = len(parts) >= len(wanted) and all(map(fnmatchcase, parts, wanted))
    return ".".join(parts[: len(wanted)]) if fits else ""


def _name_between(costs: Costs, found: dict[str, str]) -> dict[str, str]:
    """Return a name for where each node lies that is in no module of `found`: between the same modules, the same name.

    Two nodes lie between the same modules if the same of them lead to both, and both lead to the same of them. What
    neither comes from one of them nor leads to one, as the labels of a loss, has no name, and may lie anywhere.
    """
    bits = {module: 1 << i for i, module in enumerate(dict.fromkeys(filter(None, found.values())))}
    before: dict[str, int] = defaultdict(int)
    behind: dict[str, int] = defaultdict(int)
    for node in costs.nodes:
        for name in node.inputs:
            before[node.name] |= before[name] | bits.get(found.get(name, ""), 0)
    for node in reversed(costs.nodes):
        for name in node.inputs:
            behind[name] |= behind[node.name] | bits.get(found[node.name], 0)
    free = [n.name for n in costs.nodes if not found[n.name] and (before[n.name] or behind[n.name])]
    return {name: f"{BETWEEN}{before[name]:x} {behind[name]:x}" for name in free}


def _suggest(costs: Costs, at: str) -> str:
    """Return, for an error, what was probably meant by a pattern that matches nothing."""
    paths = [".".join(node.owner.split(".")[:n]) for node in costs.nodes for n in range(1, node.owner.count(".") + 2)]
    paths = list(dict.fromkeys(filter(None, paths)))
    if not paths:
        return "the profile names no modules, so that cuts lie anywhere"
    patterns = [re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path) for path in paths]
    known = list(dict.fromkeys([ANYWHERE, "modules", *patterns, *paths]))
    close = get_close_matches(at, known, n=3) or patterns[:3]
    return f"did you mean {', '.join(map(repr, dict.fromkeys(close)))}?"


def _group(names: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the nodes of each name, in the order in which the names first stand; nodes without a name are left out."""
    # A module that is called twice stands where it is called first.
    found: dict[str, list[str]] = {}
    for node, name in names.items():
        if name:
            found.setdefault(name, []).append(node)
    return {name: tuple(nodes) for name, nodes in found.items()}


def compress_cuts(costs: Costs, how: str) -> Costs:
    """Return costs that price what crosses cuts as it is sent; raises ProfileError where nobody knows dtypes."""
    if how and not any(node.made for node in costs.nodes):
        raise ProfileError(
            f"the profile does not say which dtypes and shapes nodes make, which compress={how!r} asks for: profile "
            "the model again"
        )
    return replace(costs, compress=how)


def check_modules(costs: Costs, n_stages: int, at: str = "modules") -> None:
    """Raise PlanError for a model with fewer parts, at whose borders it can be cut, than there are to be stages."""
    parts = list_wholes(costs, at)
    if len(parts) < n_stages:
        modules = [name for name in parts if not name.startswith(BETWEEN)]
        named = ", ".join(modules[:MOST_NAMED]) + (", ..." if modules[MOST_NAMED:] else "")
        raise PlanError(
            f"the model has {len(modules)} modules at whose borders it can be cut ({named or 'none'}), "
            f"too few for {n_stages} stages: plan for fewer devices, or let cuts lie anywhere"
        )
