"""Homes: on which device each stage lives. `((0,), (1,), (0,))` says that device 0 has stages 0 and 2."""

from __future__ import annotations

from fxsplit.schedule.schedule import Homes


def line(n_devices: int) -> Homes:
    """Return one stage for each device, in order: ((0,), (1,), (2,)) for three devices."""
    return tuple((d,) for d in range(n_devices))


def deal_in_turn(n_devices: int, stages_per_device: int) -> Homes:
    """Return stages dealt out like cards: device d has stages d, d + n_devices, and so on.

    ((0,), (1,), (0,), (1,)) for two devices with two stages each. A microbatch passes all devices in each round, so the
    first of its short stages reaches the last device early, and the pipeline fills sooner.
    """
    return tuple((s % n_devices,) for s in range(n_devices * stages_per_device))


def go_there_and_back(n_devices: int) -> Homes:
    """Return two stages for each device, down the line and back up: ((0,), (1,), (1,), (0,)) for two devices.

    The first device also has the last stage, so a microbatch's backward begins where its forward began.
    """
    return tuple((d,) for d in (*range(n_devices), *reversed(range(n_devices))))


def cross_both_ways(n_devices: int) -> Homes:
    """Return two replicas of every stage, for a pipeline down the line and one up: ((0, 1), (1, 0)) for two devices."""
    return tuple((d, n_devices - 1 - d) for d in range(n_devices))


def group_in_blocks(counts: list[int]) -> Homes:
    """Return neighbouring stages together: `counts[d]` of them on device d; ((0,), (0,), (1,)) for [2, 1]."""
    return tuple((d,) for d, count in enumerate(counts) for _ in range(count))
