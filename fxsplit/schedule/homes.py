"""Homes: the device of each stage. `((0,), (1,), (0,))` means stages 0 and 2 on device 0, and stage 1 on device 1."""

from __future__ import annotations

from fxsplit.schedule.schedule import Homes


def line(n_devices: int) -> Homes:
    """Return one stage for each device, in order: ((0,), (1,), (2,)) for three devices."""
    return tuple((d,) for d in range(n_devices))


def deal_in_turn(n_devices: int, stages_per_device: int) -> Homes:
    """Deal the stages like cards: device d has stages d, d + n_devices, and so on.

    ((0,), (1,), (0,), (1,)) for two devices with two stages each. Each round of short stages passes all devices, so the
    first microbatch reaches the last device early, and the pipeline fills sooner.
    """
    return tuple((s % n_devices,) for s in range(n_devices * stages_per_device))


def go_there_and_back(n_devices: int) -> Homes:
    """Return two stages for each device, down the line and back: ((0,), (1,), (1,), (0,)) for two devices.

    The first device also has the last stage, so a microbatch's backward starts on the device of its first forward.
    """
    return tuple((d,) for d in (*range(n_devices), *reversed(range(n_devices))))


def cross_both_ways(n_devices: int) -> Homes:
    """Return two replicas of every stage, for pipelines in both directions: ((0, 1), (1, 0)) for two devices."""
    return tuple((d, n_devices - 1 - d) for d in range(n_devices))


def group_in_blocks(counts: list[int]) -> Homes:
    """Group neighbouring stages, `counts[d]` of them on device d: ((0,), (0,), (1,)) for [2, 1]."""
    return tuple((d,) for d, count in enumerate(counts) for _ in range(count))
