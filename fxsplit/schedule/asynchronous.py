"""The asynchronous schedules: weights change while microbatches are under way, and backward uses its forward's."""

from __future__ import annotations

from fxsplit.errors import ScheduleError
from fxsplit.schedule.action import BACKWARD, FORWARD, STEP, Action
from fxsplit.schedule.generate import alternate
from fxsplit.schedule.homes import line
from fxsplit.schedule.schedule import Schedule


def pipedream(n_devices: int, n_microbatches: int, stages_per_device: int = 1) -> Schedule:
    """Return PipeDream with weight stashing (Narayanan et al. 2019): every microbatch steps, as soon as it is back.

    Stage s forwards with its newest weights and keeps n_devices - s versions; its gradients lag n_devices - 1 - s.
    """
    rows = []
    for stage in range(n_devices):
        ahead = n_devices - stage  # microbatches under way: the one m sees the steps of those before them
        versions = [max(0, m - ahead + 1) for m in range(n_microbatches)]
        rows.append(_stepping(stage, versions, ahead, every=1))
    return _stream("PipeDream", n_devices, n_microbatches, stages_per_device, rows)


def pipedream_2bw(n_devices: int, n_microbatches: int, stages_per_device: int = 1) -> Schedule:
    """Return PipeDream-2BW (Narayanan et al. 2021): a step every n_devices microbatches, on weights two versions deep.

    Microbatches of batch k use version k - 1, and their gradients make version k + 1 from version k: a lag of 1.
    """
    if n_microbatches % n_devices:
        near = n_microbatches - n_microbatches % n_devices
        raise ScheduleError(
            f"PipeDream-2BW: {n_microbatches} microbatches do not divide into batches of {n_devices}, one for each "
            f"device: give {f'{near} or ' if near else ''}{near + n_devices}"
        )
    versions = [max(0, m // n_devices - 1) for m in range(n_microbatches)]
    rows = [_stepping(stage, versions, n_devices - stage, every=n_devices) for stage in range(n_devices)]
    return _stream("PipeDream-2BW", n_devices, n_microbatches, stages_per_device, rows)


def _stepping(stage: int, versions: list[int], ahead: int, every: int) -> tuple[Action, ...]:
    """Return one forward and one backward in turn, with `ahead` microbatches under way, and a step every so often."""
    forwards = [Action(stage, FORWARD, m, version=v) for m, v in enumerate(versions)]
    backwards = [Action(stage, BACKWARD, m, version=v) for m, v in enumerate(versions)]
    row: list[Action] = []
    for action in alternate(forwards, backwards, ahead - 1):
        row.append(action)
        if action.op == BACKWARD and (action.microbatch + 1) % every == 0:
            row.append(Action(stage, STEP, action.microbatch, version=(action.microbatch + 1) // every))
    return tuple(row)


def _stream(
    name: str, n_devices: int, n_microbatches: int, stages_per_device: int, rows: list[tuple[Action, ...]]
) -> Schedule:
    """Return the schedule of a stream of microbatches over a line of devices."""
    if stages_per_device != 1:
        raise ScheduleError(f"{name}: {stages_per_device} stages a device; it is made for 1")
    return Schedule(name, n_microbatches, line(n_devices), tuple(rows), synchronous=False)
