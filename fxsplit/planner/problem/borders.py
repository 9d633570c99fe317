"""Borders: modules that cuts may separate but not split, if the user asks for cuts at borders of modules.

`modules` are the parts at the top of the model: each submodule, and each element of a list of submodules. A transformer
has `embed`, `layers.0`, `layers.1` and `head`. `modules=2` are the parts of these, one level further down. A pattern of
paths, such as `model.layers.*`, selects modules itself. Nodes between two selected modules then stay whole too, so that
cuts lie exactly at the borders of the selected modules.
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
"""The values that the option accepts."""
BETWEEN = "between "
"""The prefix of names for nodes between modules. Module names have no space, so none begins with it."""
MOST_NAMED = 8
"""The number of modules that an error lists."""


def check_place(at: str) -> None:
    """Raise ValueError, with the accepted forms, unless `at` has one of them."""
    depth = at.removeprefix("modules=")
    named = depth != at and depth.isdecimal() and 1 <= len(depth) <= 2 and int(depth) >= 1
    # Python allows letters of any alphabet in module names.
    if not named and re.fullmatch(r"[\w*?]+(\.[\w*?]+)*", at) is None:
        raise ValueError(f"give {FORMS}")


def find_module(node: NodeCost, depth: int = 1) -> str:
    """Return the part of the model that a node is in, or "" if the model's own forward() computes it.

    depth: 1 for the parts at the top of the model, 2 for their parts, and so on.
    """
    parts: list[str] = []
    for part in filter(None, node.owner.split(".")):
        # Elements of a list have numbers, which join the list's name. Elements of a dict have names of their own.
        if part.isdecimal() and parts and "." not in parts[-1]:
            parts[-1] += f".{part}"
        else:
            parts.append(part)
    return ".".join(parts[:depth])


def list_modules(costs: Costs, depth: int = 1) -> dict[str, tuple[str, ...]]:
    """Return the nodes of each part of the model, in the order of the parts' first calls.

    Nodes computed directly in the forward() of the model, or of a module that is divided into parts, are left out.
    """
    found = {node.name: find_module(node, depth) for node in costs.nodes}
    divided = {module[:at] for module in found.values() for at, letter in enumerate(module) if letter == "."}
    return _group({name: module for name, module in found.items() if module not in divided})


def list_wholes(costs: Costs, at: str) -> dict[str, tuple[str, ...]]:
    """Return the nodes of each part that no cut may split, in the order of the parts' first calls.

    at: the permitted cuts, in a form of `check_place`. For a pattern, the nodes between two modules are a part too.

    Raises PlanError if no module matches a pattern.
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
    """Return the path of the module that contains `path` and matches the pattern, or ""."""
    parts, wanted = path.split("."), pattern.split(".")
    fits = len(parts) >= len(wanted) and all(map(fnmatchcase, parts, wanted))
    return ".".join(parts[: len(wanted)]) if fits else ""


def _name_between(costs: Costs, found: dict[str, str]) -> dict[str, str]:
    """Return a name for each node outside the modules of `found`; nodes between the same modules get the same name.

    Two nodes lie between the same modules if the same modules precede both, and the same modules follow both. A node
    with no module before or after it, such as the labels of a loss, gets no name, and may lie anywhere.
    """
    bits = {module: 1 << i for i, module in enumerate(dict.fromkeys(filter(None, found.values())))}
    before: dict[str, int] = defaultdict(int)
    after: dict[str, int] = defaultdict(int)
    for node in costs.nodes:
        for name in node.inputs:
            before[node.name] |= before[name] | bits.get(found.get(name, ""), 0)
    for node in reversed(costs.nodes):
        for name in node.inputs:
            after[name] |= after[node.name] | bits.get(found[node.name], 0)
    free = [n.name for n in costs.nodes if not found[n.name] and (before[n.name] or after[n.name])]
    return {name: f"{BETWEEN}{before[name]:x} {after[name]:x}" for name in free}


def _suggest(costs: Costs, at: str) -> str:
    """Return suggestions for a pattern that matches no module, for an error."""
    paths = [".".join(node.owner.split(".")[:n]) for node in costs.nodes for n in range(1, node.owner.count(".") + 2)]
    paths = list(dict.fromkeys(filter(None, paths)))
    if not paths:
        return "the profile names no modules, so that cuts lie anywhere"
    patterns = [re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path) for path in paths]
    known = list(dict.fromkeys([ANYWHERE, "modules", *patterns, *paths]))
    close = get_close_matches(at, known, n=3) or patterns[:3]
    return f"did you mean {', '.join(map(repr, dict.fromkeys(close)))}?"


def _group(names: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the nodes by name, in the order in which names first appear. Nodes without a name are left out."""
    # A module that is called twice appears at its first call.
    found: dict[str, list[str]] = {}
    for node, name in names.items():
        if name:
            found.setdefault(name, []).append(node)
    return {name: tuple(nodes) for name, nodes in found.items()}


def compress_cuts(costs: Costs, how: str) -> Costs:
    """Return costs that price compressed cuts. Raises ProfileError if the profile has no dtypes."""
    if how and not any(node.made for node in costs.nodes):
        raise ProfileError(
            f"the profile does not say which dtypes and shapes nodes make, which compress={how!r} needs: profile "
            "the model again"
        )
    return replace(costs, compress=how)


def check_modules(costs: Costs, n_stages: int, at: str = "modules") -> None:
    """Raise PlanError if the model has fewer parts to cut between than `n_stages`."""
    parts = list_wholes(costs, at)
    if len(parts) < n_stages:
        modules = [name for name in parts if not name.startswith(BETWEEN)]
        named = ", ".join(modules[:MOST_NAMED]) + (", ..." if modules[MOST_NAMED:] else "")
        raise PlanError(
            f"the model has {len(modules)} modules to cut between ({named or 'none'}), "
            f"too few for {n_stages} stages: plan for fewer devices, or let cuts lie anywhere"
        )
