"""A machine in TOML: devices with memory and speed, and the links that join them. Five devices, for example:

bytes_per_s = 1.25e9            # between one entry's devices and the next one's; unlimited where it is left out

[[devices]]
name = "node0"
count = 4                       # called node0.0 .. node0.3
memory_bytes = "80GB"           # or 80e9
speed = 1.0                     # relative to the hardware that was profiled
link_bytes_per_s = "300GB/s"    # between neighbours of this entry
bytes_per_s = 25e9              # each device's own link, where that is slower

[[devices]]
name = "host"
host = true                     # takes the times that the profile states for hosts
"""

from __future__ import annotations

import os
import tomllib
from math import inf
from pathlib import Path
from typing import Any

from fxsplit.errors import InputError, suggest
from fxsplit.ir.facts.given.machine import MAX_DEVICES, Device, Machine
from fxsplit.system.figures import TOO_LARGE, is_amount, parse_bytes, show
from fxsplit.system.files import explain_unreadable

KEYS = {"name", "count", "memory_bytes", "speed", "link_bytes_per_s", "bytes_per_s", "host"}


def read_machine(path: str | os.PathLike[str]) -> Machine:
    """Return the machine in a file; raises InputError, naming file, place and value, for a file that holds none.

    Devices stand in the order of the file, which is the order in which a pipeline passes them.
    """
    name = str(path)
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    # ValueError is a file that is no TOML or no text, or a path that cannot be one.
    except (OSError, ValueError, RecursionError) as error:
        what = explain_unreadable(error)
        raise InputError(f"cannot read a machine from {name!r}: {what}; give [[devices]] tables in TOML") from error
    entries = data.get("devices")
    # A key that is not known is refused: a misspelt one would be left out without a word.
    odd = sorted(data.keys() - {"devices", "bytes_per_s"})
    if odd or not isinstance(entries, list) or not entries:
        what = f"has {odd[0]!r}" if odd else "has no [[devices]]"
        hint = suggest(odd[0], ["devices", "bytes_per_s"]) if odd else ""
        raise InputError(f"{name!r} {what}: give bytes_per_s and at least one [[devices]] table{hint}")
    between = _number(data, "bytes_per_s", inf, name)
    devices: list[Device] = []
    links: list[float] = []
    for i, entry in enumerate(entries):
        where = f"{name!r}, devices {i}"
        odd = sorted(entry.keys() - KEYS) if isinstance(entry, dict) else ["?"]
        if odd:
            raise InputError(f"{where} has {odd[0]!r}: known are {', '.join(sorted(KEYS))}{suggest(odd[0], KEYS)}")
        count = entry.get("count", 1)  # `type` below, since true would pass for the number 1
        if type(count) is not int or count < 1:
            raise InputError(f"{where} has count={show(count)}: give a whole number of devices, at least 1")
        if len(devices) + count > MAX_DEVICES:
            raise InputError(f"{where} makes {show(len(devices) + count)} devices: give at most {MAX_DEVICES} in all")
        label, host = entry.get("name", f"device{i}"), entry.get("host", False)
        if not isinstance(label, str):
            raise InputError(f"{where} has name={show(label)}: give a text")
        if not isinstance(host, bool):
            raise InputError(f"{where} has host={show(host)}: give true or false")
        for k in range(count):
            # A link joins a device with the one before it, in this entry or at the end of the last one.
            if devices:
                links.append(_number(entry, "link_bytes_per_s", inf, where) if k else between)
            devices.append(
                Device(
                    name=f"{label}.{k}" if count > 1 else label,
                    memory_bytes=_number(entry, "memory_bytes", inf, where),
                    speed=_number(entry, "speed", 1.0, where),
                    bytes_per_s=_number(entry, "bytes_per_s", inf, where),
                    host=host,
                )
            )
    return Machine(tuple(devices), tuple(links))


def _number(table: Any, key: str, default: float, where: str) -> float:
    """Return a positive number of a table, or the default where the table leaves it out."""
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
