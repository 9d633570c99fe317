"""Placements: where stages live."""

from __future__ import annotations

from fxsplit.schedule.schedule import Homes


def line(n_devices: int) -> Homes:
    """Return one stage a device, in order."""
    return tuple((d,) for d in range(n_devices))


def loop(n_devices: int, stages_per_device: int) -> Homes:
    """Return stages dealt out in turn: device d has stages d, d + n_devices, and so on."""
    return tuple((s % n_devices,) for s in range(n_devices * stages_per_device))


def vee(n_devices: int) -> Homes:
    """Return two stages a device, down the line and back: device 0 has the first and the last."""
    return tuple((d,) for d in (*range(n_devices), *reversed(range(n_devices))))


def both_ways(n_devices: int) -> Homes:
    """Return two replicas of every stage, one pipeline going down the line of devices and one going up."""
    return tuple((d, n_devices - 1 - d) for d in range(n_devices))


def blocks(counts: list[int]) -> Homes:
    """Return neighbouring stages together: `counts[d]` of them on device d."""
    return tuple((d,) for d, count in enumerate(counts) for _ in range(count))
