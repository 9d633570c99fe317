"""Small things that several rooms need to know about Python and torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""Where frames of a traceback are not the user's: torch and fxsplit."""


def rebuild(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return `value` in plain tuples, lists, dicts and named tuples, with `leaf` applied to everything else.

    torch.fx keeps a graph's outputs in immutable containers; a model returns plain ones.
    """
    if isinstance(value, tuple):
        parts = [rebuild(v, leaf) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [rebuild(v, leaf) for v in value]
    if isinstance(value, dict):
        return {k: rebuild(v, leaf) for k, v in value.items()}
    return leaf(value)
