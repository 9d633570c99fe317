"""Tell the format of a file by its contents and read it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fxsplit.errors import ProfileError
from fxsplit.formats import dnn_partitioning, pipedream
from fxsplit.formats.foreign import Profile
from fxsplit.ir.facts.costs import Costs


def read(path: str | os.PathLike[str], by_bytes: bool = False) -> Profile:
    """Return the profile in a file: fxsplit's JSON, a PipeDream graph.txt, or a dnn-partitioning JSON.

    With `by_bytes` transfers will be priced by their bytes, even where the file states times.
    Raises ProfileError, naming file, place and value, for anything else.
    """
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ProfileError(f"cannot read {name!r}: {error}; give a profile written by costs.save(path)") from error
    if not text.lstrip().startswith("{"):
        return pipedream.parse(text, name)
    try:
        data = json.loads(text, parse_constant=lambda word: _refuse(name, word))
    except ValueError as error:
        if isinstance(error, ProfileError):
            raise
        raise ProfileError(f"{name!r} is no whole JSON file (is it cut off?): {error}") from error
    except RecursionError as error:
        raise ProfileError(f"{name!r} is nested too deeply for a profile") from error
    if "nodes" in data and "edges" in data:
        return dnn_partitioning.parse(data, name, by_bytes)
    return Profile(Costs.parse(data, name), "fxsplit")


def _refuse(name: str, word: str) -> float:
    """Raise for NaN and infinity, which JSON does not have and Python reads all the same."""
    raise ProfileError(f"{name!r} holds {word}: every time and size must be a finite number")
