"""Read a profile in any known format. The contents of the file determine the format, not its name."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fxsplit.errors import ProfileError
from fxsplit.formats.profiles import dnn_partitioning, pipedream
from fxsplit.formats.profiles.foreign import ProfileFile
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.system.files import explain_unreadable


def read(path: str | os.PathLike[str], by_bytes: bool = False) -> ProfileFile:
    """Return the profile in a file: fxsplit's JSON, PipeDream's graph.txt, or dnn-partitioning's JSON.

    `by_bytes`: if a file states both the time and the size of a transfer, use the size. Raises ProfileError, with file,
    place and value, for any other file.
    """
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        what = explain_unreadable(error)
        raise ProfileError(f"cannot read {name!r}: {what}; give a profile written by costs.save(path)") from error
    return parse_profile(text, name, by_bytes)


def parse_profile(text: str, name: str, by_bytes: bool = False) -> ProfileFile:
    """Return the profile in the text of a file called `name`; see `read`."""
    if not text.strip("\ufeff \t\r\n"):
        raise ProfileError(f"{name!r} is empty: give an IR, or a profile")
    # The other two formats are JSON objects.
    if not text.lstrip().startswith("{"):
        return pipedream.parse(text, name)
    try:
        data = json.loads(text, parse_constant=lambda word: _refuse(name, word))
    except ValueError as error:
        # A ProfileError is a ValueError too. Keep the one from _refuse, which is more specific.
        if isinstance(error, ProfileError):
            raise
        raise ProfileError(f"{name!r} is not a complete JSON file (is it cut off?): {error}") from error
    except RecursionError as error:
        raise ProfileError(f"{name!r} is no profile: {explain_unreadable(error)}") from error
    # fxsplit's own files have nodes but no edges: each node lists its inputs.
    if "nodes" in data and "edges" in data:
        return dnn_partitioning.parse(data, name, by_bytes)
    return ProfileFile(Costs.parse(data, name), "fxsplit")


def _refuse(name: str, word: str) -> float:
    """Raise ProfileError for NaN and infinity: JSON has neither, but Python's reader accepts both."""
    raise ProfileError(f"{name!r} holds {word}: every time and size must be a finite number")
