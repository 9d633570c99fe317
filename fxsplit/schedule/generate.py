"""The schedules by name: pure functions of the numbers of stages and microbatches, one stage a device."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from fxsplit.errors import ScheduleError
from fxsplit.schedule.action import BACKWARD, FORWARD, Action, Schedule

Generator = Callable[[int, int], Schedule]


def gpipe(n_stages: int, n_microbatches: int) -> Schedule:
    """Return GPipe (Huang et al. 2019): all forwards, then all backwards; every microbatch is in flight at once."""
    rows = (
        tuple(Action(stage, op, m) for op in (FORWARD, BACKWARD) for m in range(n_microbatches))
        for stage in range(n_stages)
    )
    return Schedule("GPipe", n_microbatches, tuple(range(n_stages)), tuple(rows))


def one_f_one_b(n_stages: int, n_microbatches: int) -> Schedule:
    """Return 1F1B (PipeDream-flush, DAPPLE): stage s holds at most n_stages - s microbatches."""
    rows = []
    for stage in range(n_stages):
        warm_up = min(n_microbatches, n_stages - stage - 1)
        row = [Action(stage, FORWARD, m) for m in range(warm_up)]
        for m in range(n_microbatches):
            if warm_up + m < n_microbatches:
                row.append(Action(stage, FORWARD, warm_up + m))
            row.append(Action(stage, BACKWARD, m))
        rows.append(tuple(row))
    return Schedule("1F1B", n_microbatches, tuple(range(n_stages)), tuple(rows))


SCHEDULES: dict[str, Generator] = {"GPipe": gpipe, "1F1B": one_f_one_b}
"""Every schedule by torch's name for it."""


PEAKS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "GPipe": lambda k, m: (m,) * k,
    "1F1B": lambda k, m: tuple(min(m, k - stage) for stage in range(k)),
}
"""How many microbatches each of k stages holds at its worst, of m: what `peak_in_flight` counts in the schedule."""


def find_schedule(name: str) -> Generator:
    """Return the generator of the schedule called `name`; raises ScheduleError naming those there are."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    folded = {n.lower(): n for n in SCHEDULES}
    close = get_close_matches(str(name).lower(), folded, n=1)
    hint = f"; did you mean {folded[close[0]]!r}?" if close else ""
    raise ScheduleError(f"unknown schedule {name!r}: known are {', '.join(SCHEDULES)}{hint}")
