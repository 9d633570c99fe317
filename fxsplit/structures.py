"""Nested outputs: torch.fx keeps them in immutable containers, a model returns plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def rebuild(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return `value` in plain tuples, lists, dicts and named tuples, with `leaf` applied to everything else."""
    if isinstance(value, tuple):
        parts = [rebuild(v, leaf) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [rebuild(v, leaf) for v in value]
    if isinstance(value, dict):
        return {k: rebuild(v, leaf) for k, v in value.items()}
    return leaf(value)
