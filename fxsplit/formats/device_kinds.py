"""Kinds of devices to estimate times for: the table in device_kinds.toml, or a TOML of one's own. Example of a file:

bandwidth = "1.2TB/s"                          # of the device's own memory
peak = { float32 = 40, bfloat16 = 200 }        # TFLOP/s, dense; also float64, tf32 and float16
launch_us = 4.0                                # of a kernel on the device; default: that of the table
host_us = 8.0                                  # of an operator by the host; default: that of the table
efficiency = { memory = 0.85 }                 # the shares of peak and bandwidth that kernels reach, by class
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fxsplit.errors import InputError, suggest
from fxsplit.system.figures import AMOUNT, is_amount, parse_bytes, show
from fxsplit.system.files import explain_unreadable

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16")
"""The names of peaks. tf32 is float32 that tensor cores round to fewer bits before they multiply."""
EFFICIENCIES = ("tensor_matmul", "matmul", "convolution", "attention", "memory")
KEYS = ("peak", "bandwidth", "launch_us", "host_us", "efficiency", "memory_bytes", "source", "checked")
TABLE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device, from its data sheet.

    - `peak`: FLOP/s by name of dtype, `bandwidth` and `memory_bytes` of its own memory, in bytes per second and bytes
    - `launch_us` and `host_us`: the microseconds that a kernel takes at least, and that the host takes for an operator
    - `efficiency`: the share of a peak, or of the bandwidth, that kernels of a class reach
    - `table`: the version of the table, or the file of one's own
    - `source` of the figures, and the measurements that estimates were `checked` against; empty if there are none
    """

    name: str
    peak: Mapping[str, float]
    bandwidth: float
    memory_bytes: float
    launch_us: float
    host_us: float
    efficiency: Mapping[str, float]
    table: str
    source: str = ""
    checked: str = ""

    def check_dtype(self, dtype: str) -> None:
        """Raise InputError if the device does not compute in a dtype."""
        if dtype not in self.peak:
            raise InputError(
                f"device {self.name!r} does not compute in {dtype}: it has {', '.join(self.peak)}; give one of these "
                "as the dtype, or another device"
            )


@cache
def _read_file() -> Mapping[str, Any]:
    """Return the contents of the table's file."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def find_link(name: object) -> Mapping[str, Any]:
    """Return the bandwidth and the latency of a link, such as `pcie4`. Raises InputError for an unknown name."""
    links = _read_file()["links"]
    if not isinstance(name, str) or name not in links:
        raise InputError(f"link={show(name)}: known are {', '.join(links)}{suggest(name, links)}")
    return {key: links[name][key] for key in ("bytes_per_s", "latency_us")}


@cache
def read_table() -> Mapping[str, DeviceKind]:
    """Return the kinds of the table, by name."""
    data = _read_file()
    defaults = {key: data[key] for key in ("launch_us", "host_us", "efficiency")}
    return {name: _make_kind(name, row, data["version"], defaults, name) for name, row in data["devices"].items()}


def find_device_kind(name: str | os.PathLike[str]) -> DeviceKind:
    """Return a kind by its name in the table, such as `h100`, or from the path of a TOML file.

    Case, spaces, dashes and underscores do not matter. Raises InputError for an unknown name, with the list and the
    nearest name, and for a file without the figures of a device.
    """
    text, table = os.fspath(name), read_table()
    if text.endswith(".toml"):
        return _read_own(Path(text), next(iter(table.values())))
    plain = {_fold(known): known for known in table}
    if _fold(text) not in plain:
        # Of a family, such as a100, all members are near.
        family = [known for folded, known in plain.items() if text and folded.startswith(_fold(text))]
        near = f"; did you mean {' or '.join(map(repr, family))}?" if family else suggest(text, table)
        raise InputError(
            f"unknown device {show(text)}: known are {', '.join(table)}, or give a TOML file of your own{near}"
        )
    return table[plain[_fold(text)]]


def _fold(name: str) -> str:
    """Return a name as names are compared."""
    return re.sub(r"[\s_-]", "", name.lower())


def _read_own(path: Path, known: DeviceKind) -> DeviceKind:
    """Return the kind in a file of one's own. What the file leaves out is as in the table. Raises InputError."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        what = explain_unreadable(error)
        raise InputError(f"cannot read a device from {str(path)!r}: {what}; give peak and bandwidth in TOML") from error
    odd = next((key for key in data if key not in KEYS), None)
    if odd is not None:
        raise InputError(f"{str(path)!r} has {odd!r}: known are {', '.join(KEYS)}{suggest(odd, KEYS)}")
    defaults = {"launch_us": known.launch_us, "host_us": known.host_us, "efficiency": known.efficiency}
    return _make_kind(path.stem, data, path.name, defaults, str(path))


def _make_kind(name: str, row: Mapping[str, Any], table: str, defaults: Mapping[str, Any], where: str) -> DeviceKind:
    """Return the kind of a row. Raises InputError, with the place, for a figure that is missing or wrong."""
    peak = _read_figures(row, "peak", DTYPES, where)
    if not peak:
        raise InputError(f"{where!r} has no peak: give TFLOP/s by dtype, such as peak = {{ float32 = 40.0 }}")
    if "bandwidth" not in row:
        raise InputError(f"{where!r} has no bandwidth: give that of the device's memory, such as '1.2TB/s'")
    efficiency = _read_figures(row, "efficiency", EFFICIENCIES, where)
    odd = next((key for key, share in efficiency.items() if share > 1.0), None)
    if odd is not None:
        raise InputError(f"{where!r} has an efficiency of {odd} of {efficiency[odd]:g}: give a share, at most 1")
    times = {key: row.get(key, defaults[key]) for key in ("launch_us", "host_us")}
    for key, value in times.items():
        if not is_amount(value):
            raise InputError(f"{where!r} has {key}={show(value)}: give microseconds, {AMOUNT}")
    texts = {key: row.get(key, "") for key in ("source", "checked")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise InputError(f"{where!r} has a source or checked that is no text: give a line of text")
    return DeviceKind(
        name,
        {dtype: tera * 1e12 for dtype, tera in peak.items()},
        _read_bytes(row, "bandwidth", where),
        _read_bytes(row, "memory_bytes", where) if "memory_bytes" in row else float("inf"),
        efficiency={**defaults["efficiency"], **efficiency},
        table=table,
        **times,
        **texts,
    )


def _read_figures(row: Mapping[str, Any], key: str, known: tuple[str, ...], where: str) -> dict[str, float]:
    """Return the positive numbers of a table in a row, by name. Raises InputError for another name or value."""
    found = row.get(key, {})
    if not isinstance(found, dict):
        raise InputError(f"{where!r} has {key}={show(found)}: give numbers by name, {', '.join(known)}")
    for name, value in found.items():
        if name not in known:
            raise InputError(f"{where!r} has {key}.{name}: known are {', '.join(known)}{suggest(name, known)}")
        if not (is_amount(value) and value > 0):
            raise InputError(f"{where!r} has {key}.{name}={show(value)}: give a positive number")
    return {name: float(value) for name, value in found.items()}


def _read_bytes(row: Mapping[str, Any], key: str, where: str) -> float:
    """Return a size or a rate of a row. Raises InputError unless it is positive."""
    value = row[key]
    try:
        found = parse_bytes(value, rate=key == "bandwidth") if isinstance(value, str) else value
    except ValueError as error:
        raise InputError(f"{where!r} has {key}={show(value)}: {error}") from error
    if not (is_amount(found) and found > 0):
        raise InputError(f"{where!r} has {key}={show(value)}: give a positive number of bytes")
    return float(found)
