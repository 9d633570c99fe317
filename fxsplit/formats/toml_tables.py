"""A TOML file of tables, such as the devices of a machine, with checks of its keys and numbers."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Sequence
from math import inf
from pathlib import Path
from typing import Any

from fxsplit.errors import InputError, suggest
from fxsplit.system.figures import TOO_LARGE, is_amount, parse_bytes, show
from fxsplit.system.files import explain_unreadable


def load_tables(
    path: str | os.PathLike[str], what: str, tables: str, keys: Sequence[str]
) -> tuple[str, dict[str, Any], list[Any]]:
    """Return the name of a file that describes `what`, its keys with their values, and the entries of its [[tables]].

    `keys` are the keys that may stand beside the tables. Raises InputError, with file and key, for an invalid file.
    """
    name = str(path)
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    # ValueError: the file is not TOML or not text, or the path is invalid.
    except (OSError, ValueError, RecursionError) as error:
        reason = explain_unreadable(error)
        raise InputError(f"cannot read {what} from {name!r}: {reason}; give [[{tables}]] tables in TOML") from error
    entries = data.get(tables)
    # Refuse unknown keys: a misspelt key would be ignored silently.
    odd = sorted(data.keys() - {tables, *keys})
    if odd or not isinstance(entries, list) or not entries:
        found = f"has {odd[0]!r}" if odd else f"has no [[{tables}]]"
        hint = suggest(odd[0], [tables, *keys]) if odd else ""
        raise InputError(f"{name!r} {found}: give {', '.join(keys)} and at least one [[{tables}]] table{hint}")
    return name, data, entries


def check_keys(entry: Any, keys: Collection[str], where: str) -> None:
    """Raise InputError for an entry that is no table, or that has an unknown key."""
    odd = sorted(entry.keys() - keys) if isinstance(entry, dict) else ["?"]
    if odd:
        raise InputError(f"{where} has {odd[0]!r}: known are {', '.join(sorted(keys))}{suggest(odd[0], keys)}")


def take_number(table: Any, key: str, default: float, where: str) -> float:
    """Return a positive number from a table, or the default if the key is absent.

    A key with "bytes" may have a text with a unit, such as "40GB" or "25GB/s". Raises InputError for another value.
    """
    value = table.get(key, default)
    if isinstance(value, str) and "bytes" in key:
        try:
            value = parse_bytes(value, rate=key.endswith("per_s"))
        except ValueError as error:
            raise InputError(f"{where} has {key}={show(value)}: {error}") from error
    # TOML has true, inf and nan. true is a number in Python; nan is not greater than 0.
    if not (is_amount(value) or value == inf) or not value > 0:
        raise InputError(f"{where} has {key}={show(value)}: give a positive number less than {TOO_LARGE:g}")
    return float(value)
