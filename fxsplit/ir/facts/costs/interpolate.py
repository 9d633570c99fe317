"""Interpolate costs: from profiles of a model at two microbatch sizes to the costs at a size between them.

Every time and every size is interpolated linearly in the rows of a microbatch. The weights do not depend on rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from fxsplit.errors import ProfileError
from fxsplit.ir.facts.costs.compress import parse_tensor
from fxsplit.ir.facts.costs.costs import Costs, NodeCost
from fxsplit.system.figures import show

T = TypeVar("T")
NAMING = ("name", "op", "module", "inputs", "parameter_bytes")
"""The fields of a node that are the same in all profiles of a model."""


def check_one_model(profiles: Sequence[Costs], names: Sequence[str]) -> None:
    """Raise ProfileError unless the profiles are of one model, at different microbatch sizes and on equal devices.

    The model is compared by its inputs and outputs, and by the name, operator, module, inputs and weights of each node.
    `names` are those of the profiles, for errors.
    """
    first, sizes = profiles[0], dict[int, str]()
    for costs, name in zip(profiles, names, strict=True):
        different = _find_difference(first, costs)
        if different:
            raise ProfileError(
                f"{name!r} is not a profile of the model in {names[0]!r}: {different}; give profiles of one model, "
                "measured at several microbatch sizes"
            )
        here, there = _name_device(costs), _name_device(first)
        if here != there:
            raise ProfileError(
                f"{name!r} is of device {here}, and {names[0]!r} of device {there}: measure both on one device"
            )
        if costs.inference != first.inference:
            raise ProfileError(
                f"only one of {name!r} and {names[0]!r} was measured for inference: measure both for training"
            )
        if costs.rows < 1:
            raise ProfileError(f"{name!r} does not say how many rows its microbatch has: measure the model again")
        if costs.rows in sizes:
            raise ProfileError(
                f"{sizes[costs.rows]!r} and {name!r} are both of microbatches of {costs.rows} rows: give one of them"
            )
        sizes[costs.rows] = name


def _name_device(costs: Costs) -> str:
    """Return the device of the times, and that they are estimated if they are."""
    if costs.estimated:
        return f"{costs.estimated.device} (estimated for {costs.estimated.dtype})"
    return costs.environment.get("device", costs.device_kind)


def _find_difference(first: Costs, other: Costs) -> str:
    """Return the first difference between the graphs of two profiles, for people; empty if there is none."""
    for what, here, there in (
        ("inputs", [i.name for i in first.inputs], [i.name for i in other.inputs]),
        ("outputs", [*first.outputs], [*other.outputs]),
    ):
        if here != there:
            return f"the {what} are {show(here)} there and {show(there)} here"
    for number, (mine, its) in enumerate(zip(first.nodes, other.nodes, strict=False)):
        for name in NAMING:
            here, there = getattr(mine, name), getattr(its, name)
            if here != there:
                at = f"node {number}" if name == "name" else f"node {mine.name!r}"
                return f"{name} of {at} is {show(here)} there and {show(there)} here"
    counts = len(first.nodes), len(other.nodes)
    return "" if counts[0] == counts[1] else f"there are {counts[0]} nodes there and {counts[1]} here"


def interpolate_costs(lower: Costs, higher: Costs, rows: int) -> Costs:
    """Return the costs at `rows` rows, between the rows of two profiles of one model."""
    share = (rows - lower.rows) / (higher.rows - lower.rows)
    nodes = tuple(_interpolate_node(a, b, share) for a, b in zip(lower.nodes, higher.nodes, strict=True))
    inputs = tuple(_interpolate(a, b, share) for a, b in zip(lower.inputs, higher.inputs, strict=True))
    loss = None if lower.loss is None or higher.loss is None else _interpolate(lower.loss, higher.loss, share)
    return replace(
        lower,
        nodes=nodes,
        inputs=inputs,
        loss=loss,
        rows=rows,
        together=tuple(dict.fromkeys((*lower.together, *higher.together))),
        ordered=tuple(dict.fromkeys((*lower.ordered, *higher.ordered))),
    )


def _interpolate_node(lower: NodeCost, higher: NodeCost, share: float) -> NodeCost:
    """Return the costs of a node between two sizes."""
    found = _interpolate(lower, higher, share)
    # Rounding must not make a part larger than the whole.
    late_ms = None if found.weight_ms is None else min(found.weight_ms, found.backward_ms)
    # If another node keeps the memory at the other size, count the memory for longer.
    agreed = lower.kept_for == higher.kept_for
    kept_for, kept_bytes = (lower.kept_for, min(found.kept_for_bytes, found.kept_bytes)) if agreed else ("", 0.0)
    return replace(found, weight_ms=late_ms, kept_for=kept_for, kept_for_bytes=kept_bytes, signature="")


def _interpolate(lower: T, higher: T, share: float) -> T:
    """Return the object between two dataclass objects: each figure at its share of the way, the rest as in `lower`."""
    mixed: dict[str, Any] = {}
    for name in (f.name for f in fields(lower) if f.type in ("float", "float | None")):  # type: ignore[arg-type]
        a, b = getattr(lower, name), getattr(higher, name)
        mixed[name] = None if a is None or b is None else a + share * (b - a)
    if hasattr(lower, "made"):
        mixed["made"] = _interpolate_shape(lower.made, higher.made, share)  # type: ignore[attr-defined]
    return replace(lower, **mixed)  # type: ignore[type-var]


def _interpolate_shape(lower: str, higher: str, share: float) -> str:
    """Return the text of a dtype and a shape between two others, such as `float32[4, 8]`; empty if they do not fit."""
    a, b = parse_tensor(lower), parse_tensor(higher)
    if lower == higher or a is None or b is None or a[0] != b[0] or len(a[1]) != len(b[1]):
        return lower if lower == higher else ""
    sizes = [round(m + share * (n - m)) for m, n in zip(a[1], b[1], strict=True)]
    return f"{a[0]}[{', '.join(map(str, sizes))}]"
