"""What commands print for other programs: JSON as its standard has it."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any


def print_json(data: Any) -> None:
    """Print one object as JSON; a number that is infinite or none at all is null, as JSON has no word for it."""
    print(json.dumps(_replace_infinite(data), allow_nan=False))


def _replace_infinite(data: Any) -> Any:
    """Return the same data with None in place of each float that is not finite."""
    if isinstance(data, dict):
        return {key: _replace_infinite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_replace_infinite(value) for value in data]
    return None if isinstance(data, float) and not isfinite(data) else data
