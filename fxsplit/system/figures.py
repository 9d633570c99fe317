"""Check and format figures from files and users: times and sizes that the planner can add without overflow."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from math import floor, inf, isfinite, log10
from numbers import Real
from typing import Any

from fxsplit.errors import InputError, ProfileError

TOO_LARGE = 1e60
"""Times and sizes from here on are refused as mistakes. Sums and products of smaller numbers do not overflow."""
AMOUNT = f"a finite number, zero or more and less than {TOO_LARGE:g}"
"""The range of `is_amount` in words. 1e308 is finite too, so "finite" is not enough."""
SHOWN = 60
"""The number of characters of a wrong value that an error shows: a damaged file may hold a list of a million items."""


def is_amount(value: Any) -> bool:
    """Return whether a value can be a time or a size: a number from 0 up to TOO_LARGE. A bool is not."""
    number = isinstance(value, (int, float, Real))
    return number and not isinstance(value, bool) and 0 <= value < TOO_LARGE


BYTES = {"": 1.0, "B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
BYTES |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
"""Bytes by unit of sizes and rates. A number without a unit is in bytes."""


def parse_bytes(text: str, *, rate: bool = False) -> float:
    """Return a size such as `40GB`, `1.5 GiB` or `8e10` in bytes. With `rate`, also take `25GB/s`, in bytes per second.

    Raises ValueError, with the known units, for any other text. A lower-case b means bits elsewhere, so it is refused.
    """
    found = re.fullmatch(r"\s*(inf|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([A-Za-z]*)(/s)?\s*", text)
    if found is None or found[2] not in BYTES or (found[3] and not rate):
        what, example = ("bytes per second", "25GB/s") if rate else ("bytes", "40GB")
        raise ValueError(f"give {what}, such as {example}; units are {', '.join(unit for unit in BYTES if unit)}")
    count = float(found[1]) * BYTES[found[2]]
    if count == inf and found[1] != "inf":
        raise ValueError(f"give a number below {TOO_LARGE:g}, or inf")
    return count


def format_bytes(count: float) -> str:
    """Return a number of bytes as text for people, in powers of 1024: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def format_ms(ms: float) -> str:
    """Return a time for people, with three digits that count: `0.0412 ms`, `14.0 ms`, `1.25 s`."""
    if ms >= 1000.0:
        return f"{ms / 1000.0:.3g} s" if ms < 1e6 else f"{ms / 1000.0:.0f} s"
    # Python would write 0.00001 as 1e-05, and 14.0 as 14.
    digits = 3 if ms <= 0 else max(0, 2 - floor(log10(ms)))
    return "0 ms" if ms <= 0 else f"{ms:.{min(digits, 6)}f} ms"


def format_share(share: float) -> str:
    """Return a share from 0 to 1 in percent for people: `27.3 %`."""
    return f"{100 * share:.1f} %"


def format_count(count: int, noun: str) -> str:
    """Return a number with a noun: `1 microbatch`, `2 microbatches`."""
    plural = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{plural}"


def is_count(value: object, least: int = 0) -> bool:
    """Return whether a value is an int from `least` up to the largest that a float holds exactly. A bool is not."""
    return type(value) is int and least <= value < 2**53


def check_flag(name: str, value: object) -> None:
    """Raise InputError unless the argument `name` is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{name}={show(value)}: give True or False")


def as_list(value: object) -> tuple[Any, ...]:
    """Return the items of a list from a file. Raises TypeError for any other value."""
    if not isinstance(value, list):
        raise TypeError(f"{show(value)} is not a list")
    return tuple(value)


def show(value: object, most: int = SHOWN) -> str:
    """Return a value for a message, cut after `most` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to format an int of more than 4,300 digits
        return "a number of thousands of digits"
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= most else text[:most] + "..."


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda v: isinstance(v, str), "a text"),
    "bool": (lambda v: isinstance(v, bool), "true or false"),
    "float": (is_amount, AMOUNT),
    "float | None": (lambda v: v is None or is_amount(v), AMOUNT),
    "tuple[str, ...]": (lambda v: isinstance(v, tuple) and all(isinstance(n, str) for n in v), "a list of names"),
}
"""For each type of a record's field, a check of its values and a description of them."""


def check_record(what: str, record: Any) -> None:
    """Raise ProfileError unless every field of a dataclass object has a valid value; `what` names the object."""
    for name, fits, words in _list_fields(record.__class__):
        value = getattr(record, name)
        if not fits(value):
            raise ProfileError(f"{what} has {name}={show(value)}: give {words}")


@cache  # a profile has thousands of records of one type
def _list_fields(record_type: Any) -> list[tuple[str, Callable[[Any], bool], str]]:
    """Return the fields of a dataclass, each with its check and description."""
    return [(f.name, *KINDS[str(f.type)]) for f in fields(record_type)]


def replace_infinite(data: Any) -> Any:
    """Return the data with None in place of each NaN and infinity, which JSON cannot express."""
    if isinstance(data, dict):
        return {key: replace_infinite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [replace_infinite(value) for value in data]
    return None if isinstance(data, float) and not isfinite(data) else data
