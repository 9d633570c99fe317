"""The asynchronous schedules: the optimizer steps while microbatches are in flight.

A device never waits for the last microbatch of a batch, so it is never idle once the pipeline is full. The price: a
microbatch's backward must use the weights of its forward, so several weight versions are kept.

    device 0: F0 F1       B0--- F2 B1--- F3 B2---    B3---      PipeDream on 2 devices: a step after each B,
    device 1:    F0 B0--- F1 B1--- F2 B2--- F3 B3---            so F2 on device 0 uses the weights after step 0
"""

from __future__ import annotations

from fxsplit.errors import ScheduleError
from fxsplit.schedule.action import BACKWARD, STEP, Action
from fxsplit.schedule.generators.synchronous import alternate_on
from fxsplit.schedule.homes import line
from fxsplit.schedule.schedule import Schedule


def pipedream(n_devices: int, n_microbatches: int, stages_per_device: int = 1) -> Schedule:
    """Return PipeDream with weight stashing (Narayanan et al. 2019): a step after every backward.

    On 2 devices with 4 microbatches (`v2` is weight version 2):

        0F0 0F1 0B0 0STEP0v1 0F2v1 0B1 0STEP1v2 0F3v2 0B2v1 0STEP2v3 0B3v2 0STEP3v4
        1F0 1B0 1STEP0v1 1F1v1 1B1v1 1STEP1v2 1F2v2 1B2v2 1STEP2v3 1F3v3 1B3v3 1STEP3v4

    A forward uses the newest weights of its stage. Stage s has n_devices - s microbatches in flight and keeps that many
    weight versions. Its gradients are applied to weights that are n_devices - 1 - s versions newer.
    """
    rows = []
    for stage in range(n_devices):
        # With `ahead` microbatches in flight, microbatch m misses the steps of the `ahead` - 1 microbatches before it.
        ahead = n_devices - stage
        versions = [max(0, m - ahead + 1) for m in range(n_microbatches)]
        rows.append(_stream_with_steps(stage, versions, ahead, every=1))
    return _schedule_stream("PipeDream", n_devices, n_microbatches, stages_per_device, rows)


def pipedream_2bw(n_devices: int, n_microbatches: int, stages_per_device: int = 1) -> Schedule:
    """Return PipeDream-2BW (Narayanan et al. 2021): a step every n_devices microbatches, two weight versions.

    On 2 devices with 4 microbatches:

        0F0 0F1 0B0 0F2 0B1 0STEP1v1 0F3 0B2 0B3 0STEP3v2
        1F0 1B0 1F1 1B1 1STEP1v1 1F2 1B2 1F3 1B3 1STEP3v2

    The microbatches of batch k use weight version k - 1, and their gradients make version k + 1 from version k: the
    gradients of every stage are one version old. Raises ScheduleError unless n_devices divides n_microbatches.
    """
    # With several stages a device no number of microbatches works; _schedule_stream raises that error.
    if stages_per_device == 1 and n_microbatches % n_devices:
        near = n_microbatches - n_microbatches % n_devices
        raise ScheduleError(
            f"PipeDream-2BW: {n_microbatches} microbatches do not divide into batches of {n_devices}, one for each "
            f"device: give {f'{near} or ' if near else ''}{near + n_devices}"
        )
    # When batch k begins, batch k - 1 is still in flight, so the weights of its step do not exist yet.
    versions = [max(0, m // n_devices - 1) for m in range(n_microbatches)]
    rows = [_stream_with_steps(stage, versions, n_devices - stage, every=n_devices) for stage in range(n_devices)]
    return _schedule_stream("PipeDream-2BW", n_devices, n_microbatches, stages_per_device, rows)


def _stream_with_steps(stage: int, versions: list[int], ahead: int, every: int) -> tuple[Action, ...]:
    """Return one stage's actions: 1F1B with `ahead` microbatches in flight, and a step after each `every` backwards.

    `versions[m]` is the weight version of microbatch m.
    """
    row: list[Action] = []
    for action in alternate_on(stage, BACKWARD, versions, ahead - 1):
        row.append(action)
        if action.op == BACKWARD and (action.microbatch + 1) % every == 0:
            row.append(Action(stage, STEP, action.microbatch, version=(action.microbatch + 1) // every))
    return tuple(row)


def _schedule_stream(
    name: str, n_devices: int, n_microbatches: int, stages_per_device: int, rows: list[tuple[Action, ...]]
) -> Schedule:
    """Return the schedule of a stream of microbatches over devices with one stage each.

    Raises ScheduleError for several stages a device: a microbatch's stages would use weights of different ages.
    """
    if stages_per_device != 1:
        raise ScheduleError(f"{name}: {stages_per_device} stages a device; it is made for 1")
    return Schedule(name, n_microbatches, line(n_devices), tuple(rows), synchronous=False)
