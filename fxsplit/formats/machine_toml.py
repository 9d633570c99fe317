"""A machine in TOML: devices with memory and speed, and the links between them. Example with five devices:

version = 1                     # of this format; default: 1
bytes_per_s = 1.25e9            # between the devices of one entry and of the next; default: unlimited
latency_us = 12.0               # of the same links, in microseconds; default: 0
transfers = "blocking"          # devices wait for their messages; default: "asynchronous"

[[devices]]
name = "node0"
count = 4                       # called node0.0 .. node0.3
memory_bytes = "80GB"           # or 80e9
speed = 1.0                     # relative to the profiled hardware
link_bytes_per_s = "300GB/s"    # between neighbours within this entry
link_latency_us = 2.0           # of the same links
bytes_per_s = 25e9              # each device's own link, if it is slower

[[devices]]
kind = "a100-80"                # memory_bytes of a kind in device_kinds.toml
link = "nvlink3"                # link_bytes_per_s and link_latency_us of a link there; also outside of an entry

[[devices]]
name = "host"
host = true                     # uses the host times of the profile
"""

from __future__ import annotations

import os
from math import inf
from typing import Any

from fxsplit.errors import InputError, suggest
from fxsplit.formats.device_kinds import find_device_kind, find_link
from fxsplit.formats.toml_tables import check_keys, load_tables, take_number
from fxsplit.ir.facts.given.machine import MAX_DEVICES, TRANSFER_KINDS, Device, Machine, TransferKind
from fxsplit.system.figures import AMOUNT, is_amount, show

KEYS = {
    "name",
    "count",
    "memory_bytes",
    "speed",
    "link_bytes_per_s",
    "link_latency_us",
    "bytes_per_s",
    "host",
    "kind",
    "link",
}
TOP_KEYS = ("bytes_per_s", "latency_us", "transfers", "link", "version")
VERSION = 1


def read_machine(path: str | os.PathLike[str]) -> Machine:
    """Return the machine that a TOML file describes.

    Raises InputError, with file, place and value, for an invalid file.
    The order of devices in the file is the order of stages in a pipeline.
    """
    name, data, entries = load_tables(path, "a machine", "devices", TOP_KEYS)
    if data.get("version", VERSION) != VERSION:
        raise InputError(f"{name!r} has version={show(data['version'])}: this fxsplit reads version {VERSION}")
    transfers, data = _read_transfers(data, name), _fill_in(data, repr(name), "")
    between = take_number(data, "bytes_per_s", inf, name), _read_latency(data, "latency_us", name)
    devices: list[Device] = []
    links: list[tuple[float, float]] = []
    for i, entry in enumerate(entries):
        where = f"{name!r}, devices {i}"
        count, label, host = _check_entry(entry, where, len(devices), f"device{i}")
        entry = _fill_in(entry, where, "link_")
        for k in range(count):
            # A link joins a device to the device before it, in this entry or the previous one.
            if devices:
                own = take_number(entry, "link_bytes_per_s", inf, where), _read_latency(entry, "link_latency_us", where)
                links.append(own if k else between)
            devices.append(
                Device(
                    name=f"{label}.{k}" if count > 1 else label,
                    memory_bytes=take_number(entry, "memory_bytes", inf, where),
                    speed=take_number(entry, "speed", 1.0, where),
                    bytes_per_s=take_number(entry, "bytes_per_s", inf, where),
                    host=host,
                )
            )
    rates, latencies = tuple(rate for rate, _ in links), tuple(ms for _, ms in links)
    return Machine(tuple(devices), rates, latencies_ms=latencies if any(latencies) else (), transfers=transfers)


def _check_entry(entry: Any, where: str, so_far: int, default: str) -> tuple[int, str, bool]:
    """Return the number of devices of an entry, their name, and whether they are hosts; raises InputError."""
    check_keys(entry, KEYS, where)
    count = entry.get("count", 1)  # compare the type, since isinstance(True, int) holds
    if type(count) is not int or count < 1:
        raise InputError(f"{where} has count={show(count)}: give a whole number of devices, at least 1")
    if so_far + count > MAX_DEVICES:
        raise InputError(f"{where} makes {show(so_far + count)} devices: give at most {MAX_DEVICES} in all")
    label, host = entry.get("name", default), entry.get("host", False)
    if not isinstance(label, str):
        raise InputError(f"{where} has name={show(label)}: give a text")
    if not isinstance(host, bool):
        raise InputError(f"{where} has host={show(host)}: give true or false")
    return count, label, host


def _fill_in(table: Any, where: str, prefix: str) -> dict[str, Any]:
    """Return a table with the figures of its `kind` and `link`, unless it states them itself. Raises InputError."""
    found: dict[str, Any] = {}
    try:
        if "link" in table:
            found = {prefix + key: value for key, value in find_link(table["link"]).items()}
        if "kind" in table:
            kind = table["kind"]
            if not isinstance(kind, str):
                raise InputError(f"kind={show(kind)}: give the name of a device, such as 'a100-80'")
            found["memory_bytes"] = find_device_kind(kind).memory_bytes
    except InputError as error:
        raise InputError(f"{where} has {error}") from error
    return {**found, **table}


def _read_latency(table: Any, key: str, where: str) -> float:
    """Return a latency of a table in ms; 0 if the key is absent. The file states microseconds. Raises InputError."""
    value = table.get(key, 0.0)
    if not is_amount(value):
        raise InputError(f"{where} has {key}={show(value)}: give microseconds, {AMOUNT}")
    return float(value) / 1e3


def _read_transfers(data: Any, where: str) -> TransferKind:
    """Return how the devices of a machine transfer messages. Raises InputError for an unknown word."""
    stated = data.get("transfers", "asynchronous")
    found: TransferKind | None = next((kind for kind in TRANSFER_KINDS if kind == stated), None)
    if found is None:
        raise InputError(
            f"{where} has transfers={show(stated)}: give {' or '.join(TRANSFER_KINDS)}{suggest(stated, TRANSFER_KINDS)}"
        )
    return found
